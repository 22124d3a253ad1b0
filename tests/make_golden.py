"""Writes tests/golden/bert and roberta: a small random encoder, NAME/ of adapters and their heads,
fusion-NAME/, saved by the reference library; and in expected.safetensors inputs, and what it
computes with each: hidden states, logits, fusion weights, regularisation. With a Python that has
adapters==1.3.0, transformers==4.57.6, torch==2.13.0 and tokenizers:

    python tests/make_golden.py

write_tensorflow.py makes the TensorFlow checkpoints there from bert/encoder.
"""

import json
import shutil
from pathlib import Path

import torch
from adapters import BertAdapterModel, BnConfig, RobertaAdapterModel
from adapters.composition import Fuse
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, RobertaConfig

GOLDEN = Path(__file__).parent / "golden"
WORDS = (
    "the a cat dog man woman sat ran saw on in to mat park film was good bad very not and ##s "
    "##ed un ##like ##ly"
)
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)


PFEIFFER = dict(mh_adapter=False, output_adapter=True, non_linearity="relu")
PFEIFFER |= dict(original_ln_before=True, original_ln_after=True, residual_before_ln=True)


def bottleneck(reduction_factor=8, **changes):
    return BnConfig(**{**PFEIFFER, "reduction_factor": reduction_factor, **changes})


HOULSBY = dict(mh_adapter=True, original_ln_before=False, non_linearity="swish")
OWN_LN = dict(ln_after=True, original_ln_before=False, residual_before_ln=False)
BOTH_LN = dict(mh_adapter=True, ln_before=True, ln_after=True, adapter_residual_before_ln=True)
ADAPTERS = {
    "pfeiffer": bottleneck(),
    "p4": bottleneck(4),
    "p16": bottleneck(16),
    "houlsby": bottleneck(**HOULSBY),
    "h4": bottleneck(4, **HOULSBY),
    "bapna": bottleneck(ln_before=True),
    "ln_after": bottleneck(**OWN_LN, non_linearity="leakyrelu"),
    "bottom": bottleneck(**{**HOULSBY, "output_adapter": False, "non_linearity": "gelu"}),
    "both_ln": bottleneck(4, **BOTH_LN),
    "leave_out": bottleneck(leave_out=[0]),
    "post_add": bottleneck(residual_before_ln="post_add"),
    "by_layer": bottleneck({"0": 2, "default": 16}),
}
FUSIONS = {"fusion-pfeiffer": ["pfeiffer", "p4", "p16"], "fusion-houlsby": ["houlsby", "h4"]}
CHOICES = 2  # of the multiple-choice head: the batch is two questions with two choices each


def randomise(parameters, generator):
    """Random numbers with a spread at which an error shows: nothing stays at its default."""
    for name, parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1 and name.endswith("weight"):  # of a LayerNorm
            parameter.data = 1 + 0.3 * noise
        elif ".value." in name and "adapter_fusion_layer" in name:
            parameter.data = torch.eye(len(noise)) + 0.05 * noise
        elif name.endswith("bias"):
            parameter.data = 0.2 * noise
        elif "embeddings" in name:
            parameter.data = 0.5 * noise
        else:  # such that no softmax over the adapters is 0 or 1
            scale = 0.4 if "adapter_fusion_layer" in name else 1.0
            parameter.data = scale / parameter.shape[-1] ** 0.5 * noise


@torch.no_grad()
def write(directory, model, adapters, fusions, tokenizer, pad):
    generator = torch.Generator().manual_seed(2021)
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "encoder").mkdir(parents=True)
    for name in adapters:
        model.add_adapter(name, config=ADAPTERS[name])
    model.add_classification_head("pfeiffer", num_labels=3, layers=2)
    if "p4" in adapters:
        model.add_classification_head("p4", num_labels=4, layers=1)
        model.add_multiple_choice_head("p16", num_choices=CHOICES, layers=2)
    for names in fusions.values():
        model.add_adapter_fusion(names)
    model.eval()
    tokenizer(directory / "encoder")

    randomise(model.named_parameters(), generator)
    added = ("prompt_tuning", "adapter", "heads.")
    encoder = {n: p for n, p in model.named_parameters() if not any(part in n for part in added)}
    save_file(encoder, directory / "encoder" / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_diff_dict()
    config.pop("adapters", None), config.pop("prediction_heads", None)
    text = json.dumps(config, indent=2, sort_keys=True, default=str) + "\n"
    (directory / "encoder" / "config.json").write_text(text)

    # two pairs and two single texts, of different lengths, one with a run of padding
    lengths, T = [(5, 4), (7, 0), (3, 2), (2, 0)], 12
    input_ids = torch.full((len(lengths), T), pad)
    token_type_ids, attention_mask = torch.zeros(2, len(lengths), T, dtype=torch.long)
    for row, (a, b) in enumerate(lengths):
        text = torch.randint(5, model.config.vocab_size, (a + b,), generator=generator)
        input_ids[row, : a + b], attention_mask[row, : a + b] = text, 1
        token_type_ids[row, a : a + b] = model.config.type_vocab_size - 1
    inputs = dict(input_ids=input_ids, token_type_ids=token_type_ids, attention_mask=attention_mask)
    expected = dict(inputs)

    def run(name, head=None):
        output = model.base_model(**inputs, output_adapter_fusion_attentions=name in fusions)
        expected[f"{name}.last_hidden_state"] = output.last_hidden_state
        if name in fusions:
            fused = ",".join(fusions[name])
            for layer, locations in output.adapter_fusion_attentions[fused].items():
                for location, weights in locations.items():
                    expected[f"{name}.attention.{layer}.{location}"] = torch.as_tensor(weights)
            for key, parameter in model.named_parameters():  # it sums over what is trainable
                parameter.requires_grad_(f"adapter_fusion_layer.{fused}." in key)
            expected[f"{name}.regularization"] = model.get_fusion_regularization_loss()
        if head:
            choice = model.heads[head].config["head_type"] == "multiple_choice"
            shape = (2, CHOICES, T) if choice else (len(lengths), T)
            grouped = {key: value.view(shape) for key, value in inputs.items()}
            expected[f"{name}.logits"] = model(**grouped, head=head).logits

    model.set_active_adapters(None)
    run("encoder")
    for name in adapters:
        model.set_active_adapters(name)
        head = name if name in model.heads else None
        run(name, head)
        # with ln_before tensors have two names, which the library cannot write as safetensors
        options = {"with_head": head is not None, "use_safetensors": not ADAPTERS[name].ln_before}
        model.save_adapter(str(directory / name), name, **options)
    for name, names in fusions.items():
        model.set_active_adapters(Fuse(*names))
        run(name)
        model.save_adapter_fusion(str(directory / name), Fuse(*names), use_safetensors=True)
    expected = {name: tensor.contiguous() for name, tensor in expected.items()}
    save_file(expected, directory / "expected.safetensors")


def wordpiece(directory):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
    words += [f"w{i}" for i in range(60 - len(words))]
    (directory / "vocab.txt").write_text("\n".join(words) + "\n")


def byte_level_bpe(directory):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = sorted("abcdefghijklmnopqrstuvwxyzTĠ.,")
    trainer = trainers.BpeTrainer(
        vocab_size=60, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    text = "the cat sat on the mat. The dog ran to the park, and the man saw the cat."
    tokenizer.train_from_iterator([text] * 3, trainer)
    tokenizer.model.save(str(directory))
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False
    )
    tokenizer.save(str(directory / "tokenizer.json"))


if __name__ == "__main__":
    bert = BertConfig(vocab_size=60, max_position_embeddings=24, **SIZES)
    write(GOLDEN / "bert", BertAdapterModel(bert), list(ADAPTERS), FUSIONS, wordpiece, pad=0)
    SIZES |= dict(type_vocab_size=1, layer_norm_eps=1e-5)
    SIZES |= dict(pad_token_id=1, bos_token_id=0, eos_token_id=2)
    roberta = RobertaAdapterModel(RobertaConfig(vocab_size=60, max_position_embeddings=24, **SIZES))
    adapters, fusions = ["pfeiffer", "p4", "houlsby"], {"fusion-pfeiffer": ["pfeiffer", "p4"]}
    write(GOLDEN / "roberta", roberta, adapters, fusions, byte_level_bpe, pad=1)
