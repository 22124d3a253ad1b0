"""Writes tests/golden, with a Python that has adapters==1.3.0, transformers==4.57.6, torch==2.13.0
and tokenizers:

    python tests/make_golden.py

models      mpnet: a small random encoder and its hidden states in float64, for inputs so long that
            every bucket of distances occurs
            bert and roberta: a small random encoder, NAME/ of adapters and their heads, and
            fusion-NAME/, saved by the reference library; and in expected.safetensors inputs, and
            what it computes with each: hidden states, logits, fusion weights, regularisation.
            write_tensorflow.py makes the TensorFlow checkpoints there from bert/encoder.
tokenizers  a small vocabulary of each kind, and the ids of texts by transformers' tokenizers
"""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import adapters
import torch
from adapters import AutoAdapterModel, BertAdapterModel, BnConfig, RobertaAdapterModel
from adapters.composition import Fuse
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    BertTokenizerFast,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaTokenizer,
    RobertaTokenizerFast,
)

GOLDEN = Path(__file__).parent / "golden"
WORDS = (
    "the a cat dog man woman sat ran saw on in to mat park film was good bad very not and ##s "
    "##ed un ##like ##ly"
)
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
FIELDS = ("input_ids", "token_type_ids", "attention_mask")
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
def write(directory, model, names, fusions, tokenizer, pad):
    generator = torch.Generator().manual_seed(2021)
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "encoder").mkdir(parents=True)
    for name in names:
        model.add_adapter(name, config=ADAPTERS[name])
    model.add_classification_head("pfeiffer", num_labels=3, layers=2)
    if "p4" in names:
        model.add_classification_head("p4", num_labels=4, layers=1)
        model.add_multiple_choice_head("p16", num_choices=CHOICES, layers=2)
    for members in fusions.values():
        model.add_adapter_fusion(members)
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
    for name in names:
        model.set_active_adapters(name)
        head = name if name in model.heads else None
        run(name, head)
        # with ln_before tensors have two names, which the library cannot write as safetensors
        options = {"with_head": head is not None, "use_safetensors": not ADAPTERS[name].ln_before}
        model.save_adapter(str(directory / name), name, **options)
    for name, members in fusions.items():
        model.set_active_adapters(Fuse(*members))
        run(name)
        model.save_adapter_fusion(str(directory / name), Fuse(*members), use_safetensors=True)
    expected = {name: tensor.contiguous() for name, tensor in expected.items()}
    save_file(expected, directory / "expected.safetensors")


def wordpiece(directory):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
    words += [f"w{i}" for i in range(60 - len(words))]
    (directory / "vocab.txt").write_text("\n".join(words) + "\n")


LETTERS = sorted("abcdefghijklmnopqrstuvwxyzTĠ.,")
SENTENCES = "the cat sat on the mat. The dog ran to the park, and the man saw the cat."


def byte_level_bpe(directory, texts=(SENTENCES,) * 3, alphabet=LETTERS, size=60):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    options = dict(special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, **options))
    tokenizer.model.save(str(directory))
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False
    )
    tokenizer.save(str(directory / "tokenizer.json"))


@torch.no_grad()
def add_pooled_head(directory, name):
    """A head like those of the paper's adapters: the library's conversion of the pretrained pooler
    and one layer, of BertForSequenceClassification."""
    static = BertForSequenceClassification.from_pretrained(directory / "encoder", num_labels=3)
    randomise(static.classifier.named_parameters(), torch.Generator().manual_seed(7))
    with TemporaryDirectory() as place:
        static.save_pretrained(place)
        flexible = AutoAdapterModel.from_pretrained(place)
    flexible.config._name_or_path = ""
    flexible.save_head(str(directory / name), "default", use_safetensors=True)
    adapters.init(static)
    static.load_adapter(str(directory / name), with_head=False, use_safetensors=True)
    static.set_active_adapters(name)
    expected = load_file(directory / "expected.safetensors")
    inputs = {field: expected[field] for field in FIELDS}
    expected[f"{name}.logits"] = static.eval()(**inputs).logits
    save_file(expected, directory / "expected.safetensors")


PIECES = "##s ##ed ##ing ##able ##aff ##e ##l ##o ##i ##2 ##3 ##好 . , ! ? ' - $ ( ) 1"
PIECES += " 。 ， 你 好 中 文 日 ℝ ™ 한 h i l o don t it s"
UNCASED = "the cat play un cafe naive ecole istanbul world"
CASED = "the The cat CAT play Play un Caf Café naive naïve École Istanbul I H world ##É"
VOCABULARIES = {  # whether it is uncased, words; what a text has beside them is unknown
    "uncased": (True, f"{UNCASED} {PIECES}"),
    "cased": (False, f"{CASED} {PIECES}"),
    "chinese": (True, f"<S> <T> the cat 天 气 ##中 {PIECES}"),
}
TEXTS = [
    "The CAT played, unaffable the cats!",
    "Café naïve ÉCOLE cafe\u0301 Straße İstanbul Istanbul",
    "don't - it's ($123) un-aff.able??",
    "你好 world中文the，日。 天气 あ 한글",
    "zebra 1,024.5 \u2603 \U0001f468\u200d\U0001f469 ℝ ™ \u05d0\u05d1",
    "hello\tthe\r\ncat\u00a0the\u3000cat\u2028the\0\ufffd\u200b\u202ecat  ",  # blanks, controls
    "[SEP] the [MASK] <s> cat </s> ##ing [cat] <mask>",
    "x" * 101 + " " + "lo" * 40,  # WordPiece reads no word of more than 100 characters
    "",
    " \t\n",
]
PAIRS = [(TEXTS[0], TEXTS[2]), (TEXTS[3], TEXTS[1]), ("", TEXTS[0])]
ALL, LENGTHS = 200, (7, 8, 12, 13, 19)


def expect(slow, fast):
    """[[texts, max_length, ids, type ids]] of the fast tokenizer. Where nothing is cut, the slow
    one has the same; of two texts that are equally long it cuts the other one first."""
    cases, result = [((text,), ALL) for text in TEXTS], []
    cases += [(texts, length) for texts in (*PAIRS, TEXTS[:1]) for length in (ALL, *LENGTHS)]
    for texts, length in cases:
        options = {"truncation": "longest_first", "max_length": length}
        encoding = fast(*texts, return_token_type_ids=True, **options)
        assert length < ALL or encoding["input_ids"] == slow(*texts)["input_ids"], texts
        result.append([texts, length, encoding["input_ids"], encoding["token_type_ids"]])
    return result


def write_tokenizers(directory):
    shutil.rmtree(directory, ignore_errors=True)
    expected = {}
    for kind, (uncased, words) in VOCABULARIES.items():
        (directory / kind).mkdir(parents=True)
        path = directory / kind / "vocab.txt"
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words.split()]
        path.write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
        both = [of(str(path), do_lower_case=uncased) for of in (BertTokenizer, BertTokenizerFast)]
        expected[kind] = expect(*both)
    (directory / "roberta").mkdir()
    byte_level_bpe(directory / "roberta", TEXTS, pre_tokenizers.ByteLevel.alphabet(), 330)
    files = [directory / "roberta" / name for name in ("vocab.json", "merges.txt")]
    both = [of(*map(str, files)) for of in (RobertaTokenizer, RobertaTokenizerFast)]
    expected["roberta"] = expect(*both)
    both[1].backend_tokenizer.save(str(directory / "roberta" / "tokenizer.json"))
    for file in files:
        file.unlink()
    text = json.dumps(expected, ensure_ascii=False, separators=(",", ":"))
    (directory / "expected.json").write_text(text.replace("]],", "]],\n"), encoding="utf-8")


def write_models():
    sizes = dict(vocab_size=60, max_position_embeddings=24, **SIZES)
    bert = BertAdapterModel(BertConfig(**sizes))
    write(GOLDEN / "bert", bert, list(ADAPTERS), FUSIONS, wordpiece, pad=0)
    add_pooled_head(GOLDEN / "bert", "by_layer")
    sizes |= dict(type_vocab_size=1, layer_norm_eps=1e-5)
    sizes |= dict(pad_token_id=1, bos_token_id=0, eos_token_id=2)
    roberta = RobertaAdapterModel(RobertaConfig(**sizes))
    names, fusions = ["pfeiffer", "p4", "houlsby"], {"fusion-pfeiffer": ["pfeiffer", "p4"]}
    write(GOLDEN / "roberta", roberta, names, fusions, byte_level_bpe, pad=1)


@torch.no_grad()
def write_mpnet(directory):
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "encoder").mkdir(parents=True)
    sizes = {**SIZES, "hidden_size": 16}
    config = MPNetConfig(vocab_size=60, max_position_embeddings=152, layer_norm_eps=1e-5, **sizes)
    model, generator = MPNetModel(config, add_pooling_layer=False), torch.Generator().manual_seed(0)
    randomise(model.named_parameters(), generator)
    model.encoder.relative_attention_bias.weight.normal_(generator=generator)
    tensors = {f"mpnet.{name}": p for name, p in model.named_parameters()}
    save_file(tensors, directory / "encoder" / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config.to_diff_dict(), indent=2, sort_keys=True, default=str) + "\n"
    (directory / "encoder" / "config.json").write_text(text)
    ids = torch.randint(5, 60, (2, 150), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, 40:], mask[1, 40:] = config.pad_token_id, 0
    h = model.double().eval()(input_ids=ids, attention_mask=mask).last_hidden_state
    expected = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    save_file({**expected, "encoder.last_hidden_state": h}, directory / "expected.safetensors")


if __name__ == "__main__":
    write_models()
    write_mpnet(GOLDEN / "mpnet")
    write_tokenizers(GOLDEN / "tokenizers")
