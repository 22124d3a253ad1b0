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
# This page reads [Pfeiffer et al., *AdapterFusion: Non-Destructive Task Composition for Transfer
# Learning* (EACL 2021)](https://arxiv.org/abs/2005.00247) with the code beside it: what a section
# says, its equation, and the lines of this repository that compute it. The code is read live from
# the files, and what is printed under a cell was computed by that cell. `make walkthrough` runs the
# page again from nothing, in a few minutes on a laptop.
#
# **Notation.** $B$ examples, $T$ tokens, $d$ the hidden size, $r$ the size of an adapter's
# bottleneck, $N$ adapters. $\Theta$ is the pretrained encoder, $\Phi_n$ the adapter of task $n$,
# $\Psi$ the fusion.

# %%
from page import *  # the repository's own names, and `show`, which prints their source

# %matplotlib inline
RUNS = Path("runs/walkthrough")

# %% [markdown]
# ## 2 What is given
#
# A pretrained encoder, and tasks with labelled data. One of them is the *target*: the aim is to do
# better on it with the help of the others, the *sources*.
#
# The paper has BERT-base and sixteen tasks. Here the encoder is MiniLM-L6, a small BERT that comes
# as a Python package, and the three tasks are made of the docstrings on this machine. An example is
# a sentence and a name. It can be wrong in two ways: the name is that of another docstring, or the
# sentence's words are shuffled.
#
# - `match`: does the name belong to the sentence? (Python's library and PyTorch)
# - `order`: are the words in order? (the same libraries)
# - `both`, the target: which of the four cases is it? (NumPy, 240 training examples)
#
# In `match` half of the sentences are shuffled, and in `order` half of the names are wrong, but
# that says nothing about the label. So each source teaches one skill, and the target needs both.

# %%
build_tasks(RUNS / "data", random.Random(0), demo.SKILLS)
rows = []
for name in ("match", "order", "both"):
    lines = (RUNS / "data" / name / "train.jsonl").read_text(encoding="utf-8").splitlines()
    for row in {row["label"]: row for row in map(json.loads, lines)}.values():
        rows.append([name, row["text_a"], row["text_b"], row["label"]])
tabulate(rows, ["task", "sentence", "name", "label"])

# %% [markdown]
# The encoder reads token ids and returns a vector for every token. It is loaded frozen: no
# parameter requires a gradient.

# %%
bert = Bert.from_pretrained("minilm")
tokenizer = load_tokenizer(bert.directory, max_length=40)
encoding = tokenizer.encode("Return the cumulative sum.", "cumsum")
ids, types = torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids])
plain = bert(ids, types)
print(*encoding.tokens)
print("ids", tuple(ids.shape), "-> hidden states [B, T, d]", tuple(plain.shape))
print("parameters of Θ that require a gradient:", sum(p.requires_grad for p in bert.parameters()))

# %% [markdown]
# A layer of BERT is self-attention and a feed-forward network, and each is closed by *Add & Norm*:
# the sub-layer's output $f$ is added to its input $x$, and the sum is normalised. Everything in the
# paper happens there, so it is a module of its own:

# %%
show(Layer.forward, AddNorm.forward)

# %% [markdown]
# The last line of `AddNorm.forward` is plain BERT. The lines above it are the rest of this page.
#
# ## 2.1 What goes wrong without adapters
#
# *Sequential fine-tuning* trains all of $\Theta$ on one task after another, and nothing protects
# what the earlier ones have learned. *Multi-task learning* needs all data at the same time, has to
# balance the tasks, and starts again for a new one. `train.py --stage full` is the first, and
# `experiments/multitask.py` the second, with an adapter for each task (section 2.2.2, MT-A).
#
# ## 2.2 Adapters
#
# An adapter is a small network inside every layer of an encoder that stays as it is.
#
# ![Where adapters sit, and what is inside the paper's own](figures/figure5.svg)
#
# The paper's own (right) sits after the feed-forward sub-layer: down to $r$ dimensions, a
# non-linearity, up again to $d$.
#
# $$h = \mathrm{LN}(f + x), \qquad z = U\,\mathrm{act}(D h + b_D) + b_U, \qquad \text{output} = \mathrm{LN}(f + z + x)$$

# %%
show(Adapter.h_and_residual, Adapter.z, Adapter.forward)

# %% [markdown]
# The weights of a new adapter are small, so training starts near BERT as it was pretrained.

# %%
add_adapter(bert, "order", AdapterConfig.pfeiffer(reduction_factor=16))
with torch.no_grad():
    change = (bert(ids, types) - plain).norm() / plain.norm()
theta = sum(p.numel() for p in bert.own_parameters().values())
phi = sum(p.numel() for p in bert.parameters() if p.requires_grad)
print(f"a new adapter in every layer changes the encoder's output by {change:.1%}")
print(f"Θ has {theta:,} parameters, Φ {phi:,} ({phi / theta:.1%})")

# %% [markdown]
# ### 2.2.1 Single-task adapters (ST-A)
#
# $\Theta$ is fixed, and each adapter is trained by itself:
#
# $$\Phi_n \leftarrow \operatorname*{argmin}_\Phi L_n(D_n; \Theta_0, \Phi)$$
#
# Here is that argmin in a few lines. `train()` in `train.py` is the same loop with a schedule, early
# stopping, clipping and checkpoints.


# %%
def fit(bert, head, examples, lr):
    """One epoch. What is trained is what requires a gradient, and nothing else says so."""
    trained = [p for p in (*bert.parameters(), *head.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr, weight_decay=0)
    for indices in batches(examples, batch_size=16, seed=0):
        batch = collate([examples[i] for i in indices], bert.config.pad_token_id)
        h = bert(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
        loss = F.cross_entropy(head(h), batch["labels"])
        loss = loss + fusion_regularization(bert)  # section 4.1; 0 until there is a fusion
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fit_on(name, limit):
    task = get_task(name, RUNS / "data")
    config = {"head_type": "classification", "num_labels": len(task.labels), "layers": 2}
    head = Head(config, bert.config)
    fit(bert, head, load_split(task, "train", tokenizer, limit), lr=5e-4)
    return head, load_split(task, "validation", tokenizer, 200)


head, examples = fit_on("order", limit=800)
with torch.no_grad():
    batch = collate(examples, bert.config.pad_token_id)
    h = bert(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
    right = (head(h).argmax(-1) == batch["labels"]).float().mean()
print(f"`order` after one epoch on 800 examples: {right:.1%} of 200 development examples are right")

# %% [markdown]
# ### 2.2.3 and appendix A.2: which architecture?
#
# Where in the layer, how many, which LayerNorms, which residual, which $r$, which non-linearity?
# The paper searches a grid, and finds the same winner on three tasks: one adapter after the
# feed-forward sub-layer, between BERT's own LayerNorm applied twice. Every point of that grid is an
# `AdapterConfig` (`adapter.py`), and `python -m experiments.architecture_search` repeats the search.
#
# ## 3 AdapterFusion
#
# ### 3.1 Two stages
#
# *Knowledge extraction* trains an adapter for each task. *Knowledge composition* fixes $\Theta$ and
# all $\Phi_n$, and new parameters $\Psi$ learn on the target $m$ to combine them:
#
# $$\Psi_m \leftarrow \operatorname*{argmin}_\Psi L_m(D_m; \Theta, \Phi_1, \ldots, \Phi_N, \Psi)$$
#
# ![Figure 1: the fusion inside a layer](figures/figure1.svg)
#
# `fit` does the second stage, too, as soon as there is a fusion. We give the encoder a second
# adapter, fuse both on the target, and compare every parameter before and after. This is the
# *non-destructive* in the paper's title:

# %%
add_adapter(bert, "match", AdapterConfig.pfeiffer(reduction_factor=16))
fit_on("match", limit=320)
add_fusion(bert, ["match", "order"])
before = {name: p.clone() for name, p in bert.named_parameters()}
fit_on("both", limit=240)
moved = {name for name, p in bert.named_parameters() if not torch.equal(p, before[name])}
rows = []
for part, mark in (("Φ of match", ".match."), ("Φ of order", ".order."), ("Ψ", ".fusion.")):
    names = [name for name in before if mark in name]
    rows.append([part, len(names), len(moved.intersection(names))])
rows.insert(0, ["Θ", len(bert.own_parameters()), len(moved & bert.own_parameters().keys())])
tabulate(rows, ["", "tensors", "of these, changed in any bit"])
assert moved == {name for name in before if ".fusion." in name}

# %% [markdown]
# ### 3.2 The equations
#
# ![Figure 2: query, keys and values of the fusion](figures/figure2.svg)
#
# In every layer $l$ and for every token $t$, an attention decides how much each adapter counts. The
# query is what the adapters read; keys and values are made of what they put out:
#
# $$\begin{aligned}
# s_{l,t} &= \operatorname{softmax}_n\left(h_{l,t}^\top Q_l \otimes z_{l,t,n}^\top K_l\right), \quad n \in \{1, \ldots, N\}\\
# z'_{l,t,n} &= z_{l,t,n}^\top V_l\\
# Z'_{l,t} &= [z'_{l,t,1}, \ldots, z'_{l,t,N}]\\
# o_{l,t} &= s_{l,t}^\top Z'_{l,t}
# \end{aligned}$$

# %%
show(Fusion.textbook, Fusion.softmax, Fusion.forward)

# %% [markdown]
# Three adapters and one sentence of two tokens. $Q$, $K$ and $z$ start small, so the scores are
# nearly 0 and the weights $s$ even. $V$ starts as the identity, so $o$ starts as the mean of the
# adapters' outputs. *A fusion starts as an even ensemble and learns from there whom to trust.*

# %%
d, r = 6, 2
adapters = [Adapter(AdapterConfig.pfeiffer(), d, r) for _ in range(3)]
fusion, h = Fusion(["a", "b", "c"], d, dropout=0.0), torch.randn(1, 2, d)
with torch.no_grad():
    z = torch.stack([adapter.z(h) for adapter in adapters], 2)
    o = fusion.textbook(h, adapters)
print(f"s  [B, T, N] = {tuple(fusion.s.shape)}\n{fusion.s[0]}")
print(f"1000 · o  [B, T, d] = {tuple(o.shape)}\n{1000 * o[0]}")
print(f"1000 · the mean of the z_n\n{1000 * z[0].mean(1)}")

# %% [markdown]
# *Where the paper is silent* this follows its authors' library: $z_n$ is the adapter's output
# without its residual, which is added after the fusion; $Q$ and $K$ have biases; dropout is applied
# to the scores. In two places it follows the library *against* the text:
# [silent.md](silent.md#where-we-follow-the-library-against-the-text).
#
# ### The same function, without the price of $N$ adapters
#
# As written, $K$ and $V$ are multiplied with every $z_n$: $2Nd^2$ multiply-adds for a token. But a
# dot product lets $K$ move to the query, a sum lets $V$ move behind it, and $z_n$ has only $r$
# dimensions of its own:
#
# $$(Qh) \cdot (K z_n) = (K^\top Q h) \cdot z_n, \qquad \sum_n s_n V z_n = V \sum_n s_n z_n, \qquad z_n = U_n a_n + b_n$$
#
# So $K$ and $V$ are applied once, and no $z_n$ is ever formed:
#
# ![The matrices of the low-rank form](figures/low_rank.svg)

# %%
show(Fusion.low_rank)

# %% [markdown]
# In float64, with adapters of different sizes and weights that differ, outputs and all gradients
# are the same:

# %%
d = 48
adapters = [Adapter(AdapterConfig.pfeiffer(), d, r).double() for r in (3, 6, 12)]
fusion = Fusion(["a", "b", "c"], d, dropout=0.0).double()
parameters = [p for module in (*adapters, fusion) for p in module.parameters()]
for p in parameters:
    torch.nn.init.normal_(p, std=0.2)
h, results = torch.randn(4, 10, d, dtype=torch.float64), []
for form in (fusion.textbook, fusion.low_rank):
    o = form(h, adapters)
    results.append([o.detach(), fusion.s, *torch.autograd.grad(o.sin().sum(), parameters)])
difference = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
print(f"weights s from {fusion.s.min():.3f} to {fusion.s.max():.3f}")
print(f"the largest difference of outputs, weights and gradients: {difference:.1e}")
assert difference < 1e-10

# %% [markdown]
# ## 4 Experiments
#
# ### 4.1 Setup
#
# AdamW, a learning rate that falls linearly to 0, early stopping on the development set. $V$ is
# regularised by an l2 norm; its distance from *what* is left open, and the library takes the
# identity: $L_m + 0.01 \sum_l \lVert V_l - I \rVert_F^2$. The prediction head, the batch size and
# the patience are not described; ours are AdapterHub's head, 32, and 5 epochs.

# %%
show(fusion_regularization)

# %% [markdown]
# ### 4.2 Tasks
#
# Sixteen tasks, all lines of the table `TASKS` in `data.py`. An example is *candidates and a label*:
# classification has one candidate and a score for each of $K$ labels, multiple choice a candidate
# for each choice, one score each, and a softmax over the choices.
#
# **Now for real.** First what a stage adds to the encoder, then the loop that all stages share:

# %%
show(train.build, train.train)

# %% [markdown]
# These are the runs of `make demo`: stage 1 on the two sources, then four systems on the target,
# with three seeds and the same 240 examples each.
#
# - *The target's own adapter*: what its few examples give by themselves.
# - *A new head on* `match`, *or on* `order`: the source's adapter stays frozen, and only a
#   prediction head is trained, so there is one skill and nothing to compose.
# - *The fusion* of the two.
#
# A model that answers one question with accuracy $a$ and guesses the other is right in about $a / 2$
# of the cases; with both skills, in about $a_1 a_2$.

# %%
skills, rows = quietly(demo.train_all, demo.parse(RUNS))
for skill, accuracy in skills.items():
    print(f"{skill}, on its own development set: {accuracy:.1%}")
print(f"the target with one skill: about {max(skills.values()) / 2:.0%}")
print(f"with both: about {skills['match'] * skills['order']:.0%}")

# %% [markdown]
# ## 5 Results
#
# The paper's hypothesis: if at least one task supports the target, fusion gains; if none does, the
# performance stays the same.

# %%
tabulate(*composition.table(rows))
print(demo.verdict(rows))

# %% [markdown]
# Each system has its own learning rate, and the fusion trains far more parameters. This target was
# built to need both skills, so large a gain is not typical. In the paper's Table 1 the gains sit
# where data are few (MRPC, RTE, CB); what this project measured on real tasks, also where fusion
# does not help, is in [results.md](results.md).
#
# ## 6 What the fusion has learned
#
# The paper's Figure 4: the weights $s$ of every layer, averaged over the development set. Here at
# `[CLS]`: in the last layer the head reads nothing else, so only there was its fusion trained.

# %%
run = load_run(RUNS / "runs" / "fusion-240-0")
found = run.fusion_weights(run.split())
at_cls = torch.stack([torch.stack([s[0] for s in one["weights"]["output"]]) for one in found])
layers = [f"layer {i + 1}" for i in range(at_cls.shape[1])]
figure, axes = plt.subplots(figsize=(6, 2), layout="constrained")
figure.colorbar(heat_map(axes, at_cls.mean(0).T, run.adapters, layers), ax=axes)
plt.show()

# %% [markdown]
# And by token, in the layers whose other tokens are read, too: the weight of `match` in one example. Above
# 0.5 `match` counts more, below it `order`.

# %%
pair = "Return the cumulative sum of the elements.", "cumsum"
(answer,) = run.predict([pair])
(one,) = run.fusion_weights([pair])
s = torch.stack(one["weights"]["output"][:-1])[:, :, run.adapters.index("match")]  # [layers, T]
figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
figure.colorbar(heat_map(axes, s, layers[:-1], one["tokens"]), ax=axes)
axes.set(title=f"weight of `match`; predicted: {answer['label']}, {answer['probability']:.0%}")
plt.show()

# %% [markdown]
# ## 8.2 Fewer adapters
#
# The outlook reports that adapters with small weights can be removed after training with almost no
# loss. To remove one is to build a fusion over the other names with the same $Q$, $K$, $V$. Neither
# can be spared here, because each was trained for another question:

# %%
examples = run.split()
for left in (["match", "order"], ["match"], ["order"]):
    trained = {key: slot.fusion.state_dict() for key, slot in run.bert.slots.items() if slot.fusion}
    add_fusion(run.bert, left)
    for key, weights in trained.items():
        run.bert.slots[key].fusion.load_state_dict(weights)
    scores = train.evaluate(run.model, run.task, examples, run.args)
    print(f"{' and '.join(left):16} accuracy {scores['accuracy']:.1%}")

# %% [markdown]
# **Where to go from here.** Your own task: [python.md](python.md). Your own idea:
# [forking.md](forking.md). The measurements: [results.md](results.md).
