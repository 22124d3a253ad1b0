"""docs/weights.json: what the page shows of two trained fusions of the demo.

    python -m docs.weights RUN_ON_BOTH RUN_ON_ASKED && make page

The page's sentences are test examples of `both`, the first of each label."""

import json
from pathlib import Path

import torch

from experiments.load_run import load_run
from experiments.skills import SKILLS
from formats.rows import read_rows
from runtime.command import Parser, run_command

ENTRIES = 3  # of a vector, which are printed


def make_weights(both, asked, rows):
    """What docs/weights.json holds, of two LoadedRuns: a fusion on `both`, and one on `asked`,
    whose adapters are the questions that its text can ask. rows: of `both`. All is computed in
    float32."""
    for run in (both, asked):
        run.args.dtype = "float32"
        run.model.float()
    sentences = []
    for row in rows:
        text, name = row["text_a"], row["text_b"]
        seconds = {"": (both, name)} | {q: (asked, f"{q}: {name}") for q in asked.adapters}
        readings = {way: read(run, (text, second)) for way, (run, second) in seconds.items()}
        parts = row["label"].split(", ")  # of `asked`: is the fault there?
        truths = {q: "yes" if SKILLS.get(q, [q])[-1] in parts else "no" for q in asked.adapters}
        truths[""] = row["label"]
        sentences.append({"text": text, "name": name, "truths": truths, "readings": readings})
    adapters = {way: (asked if way else both).adapters for way in ["", *asked.adapters]}
    step = one_step(both, (rows[0]["text_a"], rows[0]["text_b"]))
    made = {"adapters": adapters, "sentences": sentences, "step": step}
    return made | {"changes": changes(sentences, asked.adapters)}


def read(run, pair):
    """What a fusion answers, its tokens, and s, [layers][T][N]"""
    (answer,), (found,) = run.predict([pair]), run.fusion_weights([pair])
    s = [rounded(layer) for layer in found["weights"]["output"]]
    answer = {"label": answer["label"], "probability": round(answer["probability"], 3)}
    return {"tokens": found["tokens"], "answer": answer, "s": s}


@torch.inference_mode()
def one_step(run, pair):
    """A token's way through the fusion of a layer (section 3.2), in the names of fusion.py: of the
    first text, before the last layer, where the largest s is closest to 0.6, so that one adapter
    leads, and others count."""
    (found,) = run.fusion_weights([pair])
    largest = torch.stack(found["weights"]["output"][:-1]).amax(-1)  # [layers - 1, T]
    largest = largest[:, 1 : found["tokens"].index("[SEP]")]
    layer, token = divmod((largest - 0.6).abs().argmin().item(), largest.shape[1])
    token, slot, kept = token + 1, run.bert.slots[layer, "output"], []
    hook = slot.register_forward_hook(lambda _, given, output: kept.extend([*given, output]))
    run.fusion_weights([pair])
    hook.remove()
    f, x, output = (of_batch[0, token] for of_batch in kept)
    fusion = slot.fusion
    adapters = [slot.adapters[name] for name in fusion.adapter_names]
    h, residual = adapters[-1].h_and_residual(f, x, slot.norm)
    z = torch.stack([adapter.z(h) for adapter in adapters])  # [N, d]
    q, k, V_z = fusion.query(h), fusion.key(z), fusion.value(z)
    q_k = k @ q  # [N]
    s = q_k.softmax(0)
    o = s @ V_z  # [d]
    if not adapters[-1].close(o + residual, x, slot.norm).allclose(output, atol=1e-3):
        raise ValueError(f"layer {layer} computes something else than the equations on the page")
    vectors = {"x": x, "f": f, "h": h, "o": o, "sum": residual + o + x, "output": output}
    lengths = {name: round(v.norm().item(), 2) for name, v in vectors.items()}
    lengths["z"] = [round(one.norm().item(), 2) for one in z]
    lengths["V"] = round(((V_z - z).norm(dim=-1) / z.norm(dim=-1)).mean().item(), 2)
    first = {n: rounded(v[..., :ENTRIES]) for n, v in {**vectors, "z": z, "V_z": V_z}.items()}
    scores = {"q_k": [round(one, 2) for one in q_k.tolist()], "s": rounded(s)}
    where = {"layer": layer, "token": token, "text": found["tokens"][token], "d": len(h)}
    return {**where, "names": fusion.adapter_names, **first, "lengths": lengths, **scores}


def rounded(tensor):
    """Its numbers in lists, to 3 digits after the point"""
    numbers = tensor.double()
    return (numbers * 1000).round().div(1000).tolist()


def some_of(rows, of_each=3):
    """The first rows of each label, in turn"""
    labels = {}
    for row in rows:
        labels.setdefault(row["label"], []).append(row)
    return [row for group in [*zip(*labels.values(), strict=False)][:of_each] for row in group]


def changes(sentences, questions):
    """How far s is apart for two questions, in the mean of sentences and adapters, by layer:
    [[at [CLS], at the other tokens]]"""
    found = []
    for sentence in sentences:
        a, b = (torch.tensor(sentence["readings"][question]["s"]) for question in questions[:2])
        if a.shape == b.shape:  # else the questions are not equally many tokens
            moved = (a - b).abs().mean(-1)  # [layers, T]
            found.append(torch.stack([moved[:, 0], moved[:, 1:].mean(1)], 1))
    return rounded(torch.stack(found).mean(0))


def main(argv=None):
    parser = Parser("python -m docs.weights", description=__doc__)
    parser.add_argument("both", type=Path, help="a run on `both`, whose data are still there")
    parser.add_argument("asked", type=Path, help="a run on `asked`")
    args = parser.parse_args(argv)
    both, asked = load_run(args.both), load_run(args.asked)
    rows = read_rows(Path(both.args.data_dir) / "both" / "test.jsonl")
    text = json.dumps(make_weights(both, asked, some_of(rows)), ensure_ascii=False)
    Path(__file__).with_name("weights.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    run_command("weights.py", main)
