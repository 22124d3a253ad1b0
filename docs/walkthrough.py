# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # AdapterFusion, section by section
#
# This page goes through [Pfeiffer et al., *AdapterFusion: Non-Destructive Task Composition for
# Transfer Learning* (EACL 2021)](https://arxiv.org/abs/2005.00247) with the code beside it. For
# each section it says what the paper says, in our words; gives the equation; shows the lines of
# this repository that compute it; sends a small tensor through them; and says what was chosen
# where the paper leaves something open.
#
# Nothing here is pasted. The code is read from the files as they are (`inspect.getsource`), every
# number was computed by the cell above it, and the adapters and the fusion are really trained, on
# a laptop's processor, in a few minutes. `make walkthrough` runs the page again from nothing. Its
# source is `docs/walkthrough.py`.
#
# **Notation.** $B$ examples, $T$ tokens, $d$ the hidden size, $r$ the size of an adapter's
# bottleneck, $N$ adapters. $\Theta$ is the pretrained encoder, $\Phi_n$ the adapter of task $n$,
# $\Psi$ the fusion.

# %%
import contextlib
import inspect
import io
import json
import os
import random
import sys
import textwrap
import time
import warnings
from pathlib import Path

root = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "fusion.py").is_file())
os.chdir(root)
sys.path.insert(0, str(root))
warnings.filterwarnings("ignore", message="IProgress not found")  # a bar that nobody looks at

import datasets
import matplotlib.pyplot as plt
import torch
from IPython.display import Image, Markdown, display

import train
from adapter import Adapter, AdapterConfig, add_adapter, load_adapter
from bert import AddNorm, Bert
from experiments import curves, demo, evaluate, figure4
from experiments.load_run import load_run, load_run_split
from experiments.predict import weights_of
from formats.tokenizer import load_tokenizer
from fusion import Fusion, add_fusion, fusion_regularization, fusions
from variants.multitask import task_probabilities

# %matplotlib inline
plt.rcParams["figure.dpi"] = 90
datasets.disable_progress_bars()
torch.manual_seed(0)
RUNS = Path("runs/walkthrough")
started = time.monotonic()


def show(*things):
    """The source of functions, methods and classes, as it stands in the repository today."""
    for thing in things:
        lines, number = inspect.getsourcelines(thing)
        file = Path(inspect.getsourcefile(thing)).resolve().relative_to(root)
        code = textwrap.dedent("".join(lines))
        display(Markdown(f"`{file}`, line {number}:\n\n```python\n{code}```"))


# %% [markdown]
# ## 2 Background: what is given
#
# A pretrained encoder $\Theta_0$, and a set of tasks $C = \{(D_1, L_1), \ldots, (D_N, L_N)\}$,
# each with labelled data and a loss. One of them, $m$, is the *target*: the aim is to do better
# on it with the help of the others.
#
# The paper has BERT-base and sixteen tasks. Here the encoder is MiniLM-L6 (six layers, $d =
# 384$), a small BERT that comes as a Python package, and there are four tasks, built from the
# docstrings on this machine as `make demo` does: which library is a sentence from (`library`),
# does it describe a function, a class or a method (`kind`), are two sentences from one docstring
# (`same`), and the target, `numpy_same`: the last question, on another library, with no more than
# 150 training examples.

# %%
model = demo.find_minilm()
demo.build_tasks(RUNS / "data", random.Random(0))
for path in sorted(RUNS.glob("data/*/train.jsonl")):
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    print(f"{path.parent.name:11} {len(rows):5} training examples, for example {rows[0]}")

# %% [markdown]
# The encoder reads batches of token ids and returns a vector for every token. It is loaded
# frozen: no parameter requires a gradient.

# %%
bert = Bert.from_pretrained(str(model))
tokenizer = load_tokenizer(bert.directory, 48, bert.config.vocab_size, bert.config.type_vocab_size)
encoding = tokenizer.encode("Return the cumulative sum.", "The axis is optional.")
ids, types = torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids])
print(*encoding.tokens)
print("ids  [B, T]    ", tuple(ids.shape))
print("h    [B, T, d] ", tuple(bert(ids, types).shape))
print("parameters of Θ that require a gradient:", sum(p.requires_grad for p in bert.parameters()))

# %% [markdown]
# ## 2.1 What goes wrong without adapters
#
# **Sequential fine-tuning** trains all of $\Theta$ on one task after another, each time starting
# from where the last one ended,
#
# $$\Theta_{0 \to 1} \leftarrow \operatorname*{argmin}_\Theta L_1(D_1; \Theta_0), \qquad
#   \Theta_{0 \to 1 \to 2} \leftarrow \operatorname*{argmin}_\Theta L_2(D_2; \Theta_{0 \to 1}), \quad \ldots$$
#
# and nothing keeps what the earlier tasks have learned in place: the network may forget it
# (*catastrophic forgetting*). Let us see it. We fine-tune the whole encoder on `library`, then on
# `kind`, and then ask the `library` head again, on top of the encoder as it is now.

# %%
common = [
    "--data-dir",
    str(RUNS / "data"),
    "--max-length",
    "48",
    "--batch-size",
    "16",
    "--overwrite",
]


def run(name, *options):
    """train.py in this process, without its output: the closing line's dictionary."""
    args = train.arguments([*map(str, options), "--out", str(RUNS / name), *common])
    with contextlib.redirect_stdout(io.StringIO()):
        result = train.train(args)
    accuracy = f"{100 * result['accuracy']:.1f} %"
    print(f"{name}: accuracy {accuracy} after epoch {result['best_epoch']}, the best one")
    return result


short = ["--epochs", 1, "--lr", "2e-4"]
first = run("full-library", "--stage", "full", "--task", "library", "--model", model, *short)
run("full-kind", "--stage", "full", "--task", "kind", "--model", RUNS / "full-library", *short)

_, head, config = load_run(RUNS / "full-library")
moved = Bert.from_pretrained(str(RUNS / "full-kind"))
task, split = load_run_split(RUNS / "full-library", moved, config)
labels, predictions, _ = train.evaluate(moved, head, task, split, 64, torch.float32)
after = (labels == predictions).double().mean().item()
print(
    f"`library` before the second task {100 * first['accuracy']:.1f} %, after it {100 * after:.1f} %;"
)
print(f"always saying the most frequent class: {100 * labels.bincount().max() / len(labels):.1f} %")

# %% [markdown]
# **Multi-task learning** trains on all tasks at once,
#
# $$\Theta_{0 \to \{1, \ldots, N\}} \leftarrow \operatorname*{argmin}_\Theta \sum_{n=1}^{N} L_n(D_n; \Theta_0),$$
#
# so all data must be there at the same time, a new task means training everything again, and
# somebody has to decide how often each task is seen. The paper follows Stickland and Murray
# (2019): task $n$ is next with a probability $\propto |D_n|^\alpha$, with an $\alpha$ that falls
# from 1 to 0.2 in the course of training.

# %%
show(task_probabilities)
sizes = {"library": 500, "kind": 500, "same": 1600}
for epoch in (1, 13, 25):
    p = task_probabilities(list(sizes.values()), "annealed", epoch, 25)
    print(
        f"epoch {epoch:2}:", ", ".join(f"{name} {x:.2f}" for name, x in zip(sizes, p, strict=True))
    )

# %% [markdown]
# *Where the paper is silent:* it does not give learning rate and batch size of its head and full
# baselines; ours are in `STAGES` at the top of `train.py`.

# %% [markdown]
# ## 2.2 Adapters
#
# An adapter is a small network inside every layer of the encoder, which stays as it is. Only the
# adapter (and the task's prediction head) is trained:
#
# $$\Phi_n \leftarrow \operatorname*{argmin}_\Phi L_n(D_n; \Theta_0, \Phi)$$
#
# ![Where adapters sit, and what is inside the paper's own](figures/figure5.svg)
#
# The paper's own architecture (on the right; appendix A.2 searches for it) is one adapter in a
# layer, after the feed-forward sub-layer. With $f$ the sub-layer's output and $x$ its input,
#
# $$h = \mathrm{LN}(f + x), \qquad z = U\,\mathrm{act}(D h + b_D) + b_U, \qquad \mathrm{LN}(f + z + x)$$
#
# The place where this happens is a module of its own, `AddNorm`. It closes both sub-layers of
# every layer, and either does what BERT does, or hands over to an adapter or to a fusion:

# %%
show(AddNorm.forward, Adapter.enter, Adapter.z, Adapter.leave, Adapter.forward)

# %% [markdown]
# A tensor of $B = 1$, $T = 2$ and $d = 8$ on its way through an adapter with a bottleneck of $r =
# 2$:

# %%
d, r = 8, 2
adapter, norm = Adapter(AdapterConfig.pfeiffer(), d, r), torch.nn.LayerNorm(d)
f, x = torch.randn(1, 2, d), torch.randn(1, 2, d)
with torch.no_grad():
    h, residual = adapter.inputs(f, x, norm)
    bottleneck = adapter.act(adapter.down(h))
    z = adapter.z(h)
    output = adapter.add_and_norm(z + residual, x, norm)
tensors = {"f": f, "x": x, "h = LN(f + x)": h, "act(D h + b)": bottleneck, "z": z}
for name, tensor in {**tensors, "LN(f + z + x)": output}.items():
    print(f"{name:14} {tuple(tensor.shape)}")
assert torch.equal(output, adapter(f, x, norm)) and torch.equal(output, norm(f + z + x))
print(f"a new adapter says next to nothing: |z| is {z.norm() / f.norm():.1%} of |f|")

# %% [markdown]
# *Where the paper is silent*, this is what its authors' library does: the LayerNorm is the
# encoder's own, used twice; weights start from $\mathcal N(0, 0.02)$, biases from 0; the residual
# of the adapter is $f$.
#
# How small is $\Phi$? With the paper's reduction factor of 16:

# %%
theta = sum(p.numel() for p in bert.parameters())
add_adapter(bert, "kind", AdapterConfig.pfeiffer(reduction_factor=16))
phi = {name: p for name, p in bert.named_parameters() if p.requires_grad}
size = sum(p.numel() for p in phi.values())
print(f"Θ has {theta:,} parameters, Φ {size:,}, which is {size / theta:.1%}; in the first layer:")
for name, p in phi.items():
    if name.startswith("layers.0."):
        print(f"  {name:52} {tuple(p.shape)}")

# %% [markdown]
# ## 3.1 Two stages
#
# **Knowledge extraction:** an adapter for each task, each by itself, as above. **Knowledge
# composition:** $\Theta$ and all $\Phi_n$ are fixed, and new parameters $\Psi$ learn on the target
# task to combine them. At the size of BERT-base $\Psi$ has 21.25 million, as many as 24 adapters:
#
# $$\Psi_m \leftarrow \operatorname*{argmin}_\Psi L_m(D_m; \Theta, \Phi_1, \ldots, \Phi_N, \Psi)$$
#
# ![Figure 1: the fusion inside a layer](figures/figure1.svg)
#
# Both are the same loop. What a stage trains is what requires a gradient, and nothing else says
# so:

# %%
show(train.build, train.train)

# %% [markdown]
# A new fusion over two adapters leaves exactly $\Psi$ trainable:

# %%
add_adapter(bert, "same", AdapterConfig.pfeiffer(reduction_factor=16))
add_fusion(bert, ["kind", "same"])
trainable = {name.split(".")[-2] for name, p in bert.named_parameters() if p.requires_grad}
print("trainable parts of each layer:", ", ".join(sorted(trainable)))
print(
    "slots with a fusion:",
    ", ".join(f"layer {layer + 1} {place}" for (layer, place), _ in fusions(bert)),
)

# %% [markdown]
# ## 3.2 AdapterFusion
#
# ![Figure 2: query, keys and values of the fusion](figures/figure2.svg)
#
# In every layer $l$ and for every token $t$, an attention decides how much each adapter has to
# say. The query is the hidden state that the adapters read, keys and values are what they answer:
#
# $$\begin{aligned}
# s_{l,t} &= \operatorname{softmax}_n\left(h_{l,t}^\top Q_l \otimes z_{l,t,n}^\top K_l\right), \quad n \in \{1, \ldots, N\}\\
# z'_{l,t,n} &= z_{l,t,n}^\top V_l\\
# Z'_{l,t} &= [z'_{l,t,1}, \ldots, z'_{l,t,N}]\\
# o_{l,t} &= s_{l,t}^\top Z'_{l,t}
# \end{aligned}$$
#
# As written:

# %%
show(Fusion.textbook, Fusion.attend, Fusion.forward)

# %% [markdown]
# Three adapters, $d = 8$, one sentence of two tokens:

# %%
adapters = [Adapter(AdapterConfig.pfeiffer(), d, r) for _ in range(3)]
fusion = Fusion("a,b,c", ["a", "b", "c"], d, dropout=0.0)
with torch.no_grad():
    z = torch.stack([adapter.z(h) for adapter in adapters], 2)
    o = fusion.textbook(h, adapters)
print("h                 [B, T, d]   ", tuple(h.shape))
print("z_1 ... z_N       [B, T, N, d]", tuple(z.shape))
print("Q h               [B, T, d]   ", tuple(fusion.query(h).shape))
print("K z_n             [B, T, N, d]", tuple(fusion.key(z).shape))
print("s                 [B, T, N]   ", tuple(fusion.weights.shape))
print("o                 [B, T, d]   ", tuple(o.shape))
print("s of the first token:", [f"{weight:.3f}" for weight in fusion.weights[0, 0].tolist()])
difference = (o - (fusion.weights[..., None] * z).sum(2)).abs().max()
print(f"V starts as the identity, so o starts as Σ_n s_n z_n: they differ by {difference:.0e}")

# %% [markdown]
# *Where the paper is silent*, we follow the library again: $z_n$ is the adapter's output
# *without* its residual, which is added after the fusion; $Q$ and $K$ have biases, $V$ has none;
# dropout falls on the scores, before the softmax; $V$ starts as 1 on the diagonal and $10^{-6}$
# elsewhere, where the paper says "random weights having a small norm".
#
# ### The same function, without the price of $N$ adapters
#
# As written, $K$ and $V$ are multiplied with every $z_n$: $2Nd^2$ multiply-adds for a token. But
#
# $$(Qh) \cdot (K z_n) = (K^\top Q h) \cdot z_n, \qquad \sum_n s_n V z_n = V \sum_n s_n z_n, \qquad z_n = U_n a_n + b_n,$$
#
# so $K$ and $V$ need to be applied once, to the query and to the mixture, and $z_n$, which lives
# in only $r$ dimensions, need never be formed. What is left is about $3 N r d$ (and $3 d^2$, or
# the products of the weights with each other):

# %%
show(Fusion.low_rank)

# %% [markdown]
# **First claim: it is the same function.** In float64, with adapters of different sizes, outputs
# and all gradients:

# %%
torch.manual_seed(1)
d = 48
adapters = [Adapter(AdapterConfig.pfeiffer(), d, r).double() for r in (3, 6, 12)]
fusion = Fusion("a,b,c", ["a", "b", "c"], d, dropout=0.0).double()
for module in (*adapters, fusion):
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.2)  # larger than at the start, so that the weights s differ
parameters = [p for module in (*adapters, fusion) for p in module.parameters()]
h = torch.randn(4, 10, d, dtype=torch.float64)
results = {}
for form in ("textbook", "fast"):
    o = getattr(fusion, form)(h, adapters)
    gradients = torch.autograd.grad(o.sin().sum(), parameters)
    results[form] = o.detach(), fusion.weights, gradients
(o1, s1, g1), (o2, s2, g2) = results.values()
pairs = [(o1, o2), (s1, s2), *zip(g1, g2, strict=True)]
difference = max((a - b).abs().max().item() for a, b in pairs)
print(f"outputs up to {o1.abs().max():.1f}, weights s from {s1.min():.3f} to {s1.max():.3f}")
print(f"the largest difference of outputs, weights and gradients: {difference:.1e}")
assert difference < 1e-10

# %% [markdown]
# **Second claim: it does not cost $N$ times as much.** One layer's fusion at
# MiniLM's size, forward and backward through $\Psi$, on 16 × 32 tokens; the fastest of six, because
# other work on the machine can only make it slower.

# %%
d, r, counts = 384, 24, [1, 2, 4, 8, 16, 32, 64]
seconds = {"textbook": [], "fast": []}
h = torch.randn(16, 32, d)
for N in counts:
    adapters = [Adapter(AdapterConfig.pfeiffer(), d, r).requires_grad_(False) for _ in range(N)]
    names = [str(n) for n in range(N)]
    fusion = Fusion(",".join(names), names, d, dropout=0.1)
    for form, times in seconds.items():
        measured = []
        for _ in range(6):
            fusion.zero_grad()
            begin = time.perf_counter()
            getattr(fusion, form)(h, adapters).square().mean().backward()
            measured.append(time.perf_counter() - begin)
        times.append(min(measured))
figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
for (form, times), style in zip(seconds.items(), ("o--", "s-"), strict=True):
    axes.loglog(counts, [1000 * t for t in times], style, label=form)
axes.set_xticks(counts, counts)
axes.set(
    xlabel="N adapters", ylabel="milliseconds", title="fusion of one layer, forward and backward"
)
axes.grid(alpha=0.3)
axes.legend()
plt.show()
for N, textbook, fast in zip(counts, *seconds.values(), strict=True):
    print(f"N = {N:2}: textbook {1000 * textbook:7.1f} ms, fast {1000 * fast:5.1f} ms")

# %% [markdown]
# ## 4 Training
#
# AdamW, a learning rate that falls linearly to 0, and early stopping on the development set. For
# adapters it starts at $10^{-4}$ (at most 30 epochs), for the fusion at $5 \cdot 10^{-5}$ (at
# most 10).

# %%
show(train.set_learning_rate, train.make_optimizer)
print({stage: train.STAGES[stage] for stage in ("adapter", "fusion")})

# %% [markdown]
# "We regularize the Value matrix using l2-norm", so that it adds no capacity of its own. Its
# distance from *what* is left open; the library takes the identity, from which $V$ starts:
#
# $$L_m + 0.01 \sum_l \lVert V_l - I \rVert_F^2$$

# %%
show(Fusion.regularization)
print("at the start it is", f"{fusion_regularization(bert).item():.1e}")

# %% [markdown]
# *Also ours, because neither paper nor library says anything:* batch size 32, patience of 5
# epochs, gradients clipped at norm 1. The prediction head is AdapterHub's, and stage 2 starts a
# new one.
#
# **Now for real.** Stage 1, four times. MiniLM is small, so the learning rate is larger than the
# paper's, 5e-4; these are the settings of `make demo`.

# %%
settings = ["--model", model, "--seed", 0, "--lr", "5e-4"]
single = {
    task: run(task, "--stage", "adapter", "--task", task, "--epochs", epochs, *settings)
    for task, epochs in {"library": 1, "kind": 1, "same": 2, "numpy_same": 3}.items()
}

# %% [markdown]
# Stage 2 on the target. We keep the encoder that it trains in, to look at it afterwards.

# %%
kept, from_pretrained = [], Bert.from_pretrained
Bert.from_pretrained = lambda source: kept.append(from_pretrained(source)) or kept[-1]
try:
    stage = ["--stage", "fusion", "--task", "numpy_same", "--epochs", 5]
    fused = run("fusion-numpy_same", *stage, "--adapters", *map(RUNS.joinpath, single), *settings)
finally:
    Bert.from_pretrained = from_pretrained

# %% [markdown]
# **Third claim: non-destructive.** After stage 2, every parameter of $\Theta$ and of all $\Phi_n$
# has the bits that it had before: we compare the encoder that was trained in with the checkpoint,
# loaded anew, and the adapters of stage 1.

# %%
trained, fresh = kept[0], Bert.from_pretrained(str(model))
for task in single:
    load_adapter(fresh, RUNS / task)
before = dict(fresh.named_parameters())
after = {name: p for name, p in trained.named_parameters() if ".fusion." not in name}
assert before.keys() == after.keys() and len(before) > 100
assert all(torch.equal(before[name], after[name]) for name in before)
V = [fusion.value.weight.detach() for _, fusion in fusions(trained)]
print(
    f"{len(before)} tensors of Θ and Φ are bit-identical, {sum(p.numel() for p in before.values()):,} numbers"
)
distances = [f"{(v - torch.eye(len(v))).norm():.2f}" for v in V]
print("Ψ has moved: ‖V − I‖ by layer is", ", ".join(distances))
assert float(distances[0]) > 0

# %% [markdown]
# The learning curves of the single adapter and of the fusion, from the runs' own logs. (`python
# -m experiments.curves` does this for any runs.)

# %%
compared = [RUNS / "numpy_same", RUNS / "fusion-numpy_same"]
curves.draw({run.name: curves.read_log(run) for run in compared}, RUNS / "curves.png")
display(Image(RUNS / "curves.png", width=760))

# %% [markdown]
# ## 5 What to expect
#
# The paper's hypothesis: if some other task supports the target, fusion gains; if none does, it
# stays the same. In its Table 1, tasks with over 40,000 examples change by less than a point, and
# some of those with under 5,000 gain most (RTE 5.8 points, MRPC 5.1, CB 6.1). Our target is of
# the second kind.

# %%
m = "numpy_same"
print(
    f"{'task':12} {'examples':>8} {'adapter':>8} {'fusion':>8}      accuracy on the development set, %"
)
for task, result in single.items():
    own = f"{100 * fused['accuracy']:8.1f}" if task == m else f"{'':>8}"
    print(f"{task:12} {result['train_examples']:8} {100 * result['accuracy']:8.1f} {own}")
one = 100 / fused["dev_examples"]
print(f"\none of the {fused['dev_examples']} examples of {m} is {one:.2f} points, chance is 50 %")

# %% [markdown]
# One seed, one target, an encoder much smaller than the paper's, and the best epoch chosen on the
# data that is reported, as in the paper. [results.md](results.md) has more targets and seeds,
# with the cases where fusion does not help.

# %% [markdown]
# ## 6 What the fusion has learned
#
# The paper's Figure 4: the weights $s$, averaged over all tokens of the development set, for
# every layer. It finds that targets without a gain listen to their own adapter, that targets with
# few examples listen to related tasks with many, and that the last layer spreads its weight most.

# %%
names, weights, _ = figure4.mean_weights(RUNS / "fusion-numpy_same", RUNS / "data")
weights = torch.stack(list(weights.values()))  # [layers, N]
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
image = axes.imshow(weights.T, cmap="cividis", vmin=0, vmax=1, aspect="auto")
for layer, row in enumerate(weights.tolist()):
    for n, value in enumerate(row):
        colour = "black" if value > 0.5 else "white"
        axes.text(layer, n, f"{value:.2f}", ha="center", va="center", color=colour)
axes.set_xticks(range(len(weights)), range(1, len(weights) + 1))
axes.set_yticks(range(len(names)), names)
axes.set(xlabel="layer", ylabel="adapter", title="mean fusion weight")
figure.colorbar(image)
plt.show()
mean = weights.mean(0)
print(
    "over all layers:",
    {name: round(value, 2) for name, value in zip(names, mean.tolist(), strict=True)},
)
spread = [figure4.spread(row) for row in weights]
print("entropy by layer (1: all alike):", ", ".join(f"{value:.2f}" for value in spread))

# %% [markdown]
# The weights belong to tokens, so one can ask who spoke on which. A pair of sentences, every
# token, every layer: the adapter with the largest weight. (`python -m experiments.predict RUN ...
# --explain page.html` makes a page of it.)

# %%
bert, head, config = load_run(RUNS / "fusion-numpy_same")
tokenizer = load_tokenizer(bert.directory, 48, bert.config.vocab_size, bert.config.type_vocab_size)
pair = (
    "Return the cumulative sum of the elements.",
    "The sum is taken over the flattened array by default.",
)
encoding = tokenizer.encode(*pair)
(explained,) = weights_of(bert, tokenizer, [encoding])
letters = {name: name[0].upper() for name in names}
assert len(set(letters.values())) == len(names)
print("  ".join(f"{letter} {name}" for name, letter in letters.items()), "     (the weight in %)\n")
print(f"{'token':12}", " ".join(f"{'layer ' + str(i + 1):>8}" for i in range(len(weights))))
layers = explained["weights"]["output"]
for t, token in enumerate(explained["tokens"]):
    cells = [f"{letters[names[s[t].argmax()]]} {100 * s[t].max():3.0f}" for s in layers]
    print(f"{token:12}", " ".join(f"{cell:>8}" for cell in cells))
logits = head(bert(torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids])))
print("\nthe two are said to be from docstrings that are:", config["labels"][logits.argmax()])

# %% [markdown]
# ## 8.2 Fewer adapters
#
# The outlook reports that adapters with small weights can be removed after training with almost
# no loss. To leave an adapter out is to leave it out of the softmax (`--mask`). One after the
# other, the one with the smallest mean weight first, without any training:


# %%
def accuracy(*masked):
    words = [str(RUNS / "fusion-numpy_same"), *(["--mask", *masked] if masked else [])]
    with contextlib.redirect_stdout(io.StringIO()):
        return evaluate.evaluate_run(evaluate.arguments(words))["accuracy"]


order = [names[i] for i in mean.argsort()]
for k in range(len(order)):
    left = [name for name in names if name not in order[:k]]
    print(f"{', '.join(left):34} {100 * accuracy(*order[:k]):5.1f} %")
print(f"{'the single adapter of stage 1':34} {100 * single[m]['accuracy']:5.1f} %")

# %% [markdown]
# `python -m experiments.prune` does the same by layer, measures the speed, and writes a smaller
# run.

# %%
minutes = (time.monotonic() - started) / 60, time.process_time() / 60
print("all of this took {:.1f} minutes, {:.1f} of processor time".format(*minutes))
print(
    f"with {torch.get_num_threads()} threads; other work on the machine makes the first number larger"
)
