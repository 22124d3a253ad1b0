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
# says, its equation, and the lines that compute it, read live from the repository. What is printed
# under a cell was computed by it. `make walkthrough` runs the page, in minutes on a laptop.
#
# ![Stage 1 trains adapters, stage 2 their fusion; all else is frozen](figures/two_stages.svg)
#
# **Notation.** $B$ examples, $T$ tokens, $d$ the hidden size, $r$ the size of an adapter's
# bottleneck, $N$ adapters. $\Theta$ is the encoder, $\Theta_0$ its weights as pretrained, $\Phi_n$
# the adapter of task $n$, $\Psi$ the fusion.

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
# as a Python package, and three tasks are made of docstrings. An example is a sentence and a name,
# with two possible faults: the name is another docstring's, or the sentence's words are shuffled.
#
# - `match`: does the name belong to the sentence? (Python's library and PyTorch)
# - `order`: are the words in order? (the same)
# - `both`, the target: which of the four cases is it? (NumPy; 480 examples are trained on)
#
# In each source the other fault is there in half of the examples, whatever the label. So a source
# teaches one skill, and the target needs both. Six more adapters learn what it does not need, such
# as `the`: is this word in the sentence? Nobody says which of the eight to use.

# %%
demo.build_data(RUNS)
rows = []
for name in ("match", "order", "both"):
    lines = (RUNS / "data" / name / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows += {row["label"]: [name, *row.values()] for row in map(json.loads, lines)}.values()
tabulate(rows, ["task", "sentence", "name", "label"])

# %% [markdown]
# The encoder returns a vector for every token. It is frozen: no parameter requires a gradient.

# %%
bert = Bert.from_pretrained("minilm")
tokenizer = load_tokenizer(bert.directory, max_length=40)
encoding = tokenizer.encode("Return the cumulative sum.", "cumsum")
ids, types = torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids])
plain = bert(ids, types)
print(*encoding.tokens)
print("ids", tuple(ids.shape), "-> hidden states [B, T, d]", tuple(plain.shape))

# %% [markdown]
# A layer of BERT is self-attention and a feed-forward network, each closed by *Add & Norm*: the
# sub-layer's output $f$ is added to its input $x$, and the sum is normalised. Everything in the
# paper happens there, so it is a module of its own:

# %%
show(Layer.forward, AddNorm.forward)

# %% [markdown]
# `active` says what is computed: with `None` plain BERT, with a name that adapter (section 2.2),
# with a tuple of names their fusion (section 3). The last two are the rest of this page.
#
# ## 2.1 What goes wrong without adapters
#
# *Sequential fine-tuning* (`train.py --stage full`) trains all of $\Theta$ on one task after
# another, and nothing protects what earlier ones have taught. *Multi-task learning* needs all data
# at once, has to balance the tasks, and starts again for a new one (`experiments/multitask.py`,
# with an adapter for each task, section 2.2.2).
#
# ## 2.2 Adapters
#
# An adapter is a small network inside every layer of an encoder that stays as it is.
#
# ![Where adapters sit, and what is inside the paper's own](figures/figure5.svg)
#
# The paper's own (right) sits after the feed-forward sub-layer: down to $r$ dimensions, a
# non-linearity, up to $d$.
#
# $$\begin{aligned}
# h &= \mathrm{LN}(f + x)\\
# z &= U\,\mathrm{act}(D h + b_D) + b_U\\
# \text{output} &= \mathrm{LN}(f + z + x)
# \end{aligned}$$

# %%
show(Adapter.forward, Adapter.z, Adapter.bottleneck)

# %% [markdown]
# Both LayerNorms are BERT's one, applied twice. New weights are small, so training starts near BERT
# as pretrained.

# %%
add_adapter(bert, "order", AdapterConfig.pfeiffer(reduction_factor=16))
with torch.no_grad():
    change = (bert(ids, types) - plain).norm() / plain.norm()
theta = sum(p.numel() for p in bert.theta().values())
phi = sum(p.numel() for p in bert.parameters() if p.requires_grad)
print(f"a new adapter in every layer changes the output by {change:.1%}")
print(f"Θ has {theta:,} parameters, Φ {phi:,} ({phi / theta:.1%})")

# %% [markdown]
# ### 2.2.1 Single-task adapters (ST-A)
#
# $\Theta$ is fixed, and each adapter $\Phi_n$ is trained by itself on its task's data $D_n$:
#
# $$\Phi_n \leftarrow \operatorname*{argmin}_\Phi L_n(D_n; \Theta_0, \Phi)$$
#
# With it a prediction head is trained, which the paper does not describe. Here it is AdapterHub's:
# dropout, linear, tanh, dropout, linear, on the last layer's `[CLS]` vector.

# %%
show(Head.forward)

# %% [markdown]
# Here is that argmin in a few lines. `train()` in `train.py` adds a schedule, early stopping,
# clipping and checkpoints, and keeps dropout on in the frozen $\Theta$, as the authors' library
# does; in `fit` the head alone has dropout. These 50 steps are too few for `order`, which stays
# near chance; section 4 takes 250.


# %%
def logits(bert, head, batch):
    return head(bert(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"]))


def fit(bert, head, examples, lr):
    """One epoch. What requires a gradient is trained."""
    trained = [p for p in (*bert.parameters(), *head.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr, weight_decay=0)
    head.train()  # with dropout; `bert` is in eval mode, as it was loaded
    for indices in batches(examples, batch_size=16, seed=0):
        batch = collate([examples[i] for i in indices], bert.config.pad_token_id)
        loss = F.cross_entropy(logits(bert, head, batch), batch["labels"])
        loss = loss + fusion_regularization(bert)  # section 4.1; 0 until there is a fusion
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fit_on(name, limit):
    source = Source(RUNS / "data")
    task = quietly(get_task, name, source)
    config = {"head_type": "classification", "num_labels": len(task.labels), "layers": 2}
    head = Head(config, bert.config)
    fit(bert, head, load_split(task, source, "train", tokenizer, limit), lr=5e-4)
    return head.eval(), load_split(task, source, "validation", tokenizer, 200)


head, examples = fit_on("order", limit=800)
with torch.no_grad():
    batch = collate(examples, bert.config.pad_token_id)
    right = (logits(bert, head, batch).argmax(-1) == batch["labels"]).float().mean()
print(f"`order` after one epoch on 800 examples: {right:.1%} of 200 development examples are right")

# %% [markdown]
# ### 2.2.2 Multi-task adapters (MT-A)
#
# Adapters can also be trained for all tasks together, and $\Theta$, from $\Theta_0$, with them:
#
# $$\begin{aligned}
# &\Theta \leftarrow \operatorname*{argmin}_{\Theta, \Phi} \left(\sum_{n=1}^N L_n(D_n; \Theta_0, \Phi_n)\right),\\
# &\text{where } \Theta = \Theta_{0 \to \{1, \ldots, N\}}, \Phi_1, \ldots, \Phi_N
# \end{aligned}$$
#
# The arrow marks weights that have gone on from $\Theta_0$ on tasks $1, \ldots, N$. Everything that
# follows can be done over either kind; this page does it over single-task adapters.
#
# ### 2.2.3 and appendix A.2: which architecture?
#
# Where, how many, which LayerNorms, residual, $r$, non-linearity? The paper's grid search has the
# same winner on three tasks: one adapter after the feed-forward sub-layer, between BERT's own
# LayerNorm applied twice. Two small ones (`experiments/architecture_search.py`) have no clear one.
#
# ## 3 AdapterFusion
#
# ### 3.1 Two stages
#
# *Knowledge extraction* trains an adapter for each task. *Knowledge composition* fixes $\Theta$ and
# all $\Phi_n$; new parameters $\Psi$ learn on the target $m$ to combine them:
#
# $$\Psi_m \leftarrow \operatorname*{argmin}_\Psi L_m(D_m; \Theta, \Phi_1, \ldots, \Phi_N, \Psi)$$
#
# ![Figure 1: the fusion inside a layer](figures/figure1.svg)
#
# `fit` does the second stage, too, once there is a fusion. We train a second adapter, fuse both on
# the target, and compare every parameter before and after: the *non-destructive* in the paper's
# title. And what $\Psi$ costs: three $d \times d$ matrices in every layer, whatever $N$ and $r$.

# %%
add_adapter(bert, "match", AdapterConfig.pfeiffer(reduction_factor=16))
fit_on("match", limit=320)
add_fusion(bert, ["match", "order"])
before = {name: p.clone() for name, p in bert.named_parameters()}
head, _ = fit_on("both", limit=240)
moved = {name for name, p in bert.named_parameters() if not torch.equal(p, before[name])}
theta = {name for name in before if bert.hub_name(name)}
rows = [["Θ", len(theta), len(moved & theta)]]
for part, mark in (("Φ of match", ".match."), ("Φ of order", ".order."), ("Ψ", ".fusion.")):
    names = [name for name in before if mark in name]
    rows.append([part, len(names), len(moved.intersection(names))])
tabulate(rows, ["", "tensors", "changed in any bit"])
assert moved == {name for name in before if ".fusion." in name}
psi, of_head = (sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (bert, head))
print(f"Ψ has {psi:,} parameters, a Φ {phi:,}, the head {of_head:,}")

# %% [markdown]
# ### 3.2 The equations
#
# ![Figure 2: query, keys and values of the fusion](figures/figure2.svg)
#
# In every layer $l$ and for every token $t$, an attention decides how much each adapter
# $n \in \{1, \ldots, N\}$ counts. Its query is what the adapters read; keys and values are made of
# their outputs:
#
# $$\begin{aligned}
# s_{l,t} &= \operatorname{softmax}_n\left(h_{l,t}^\top Q_l \otimes z_{l,t,n}^\top K_l\right)\\
# z'_{l,t,n} &= z_{l,t,n}^\top V_l\\
# Z'_{l,t} &= [z'_{l,t,1}, \ldots, z'_{l,t,N}]\\
# o_{l,t} &= s_{l,t}^\top Z'_{l,t}
# \end{aligned}$$
#
# $\otimes$ is the dot product. The paper multiplies rows, $h^\top Q$, and `nn.Linear` columns, $Wh$
# with $W = Q^\top$: in the code, and from here on, $Q$, $K$ and $V$ are these $W$.
#
# First one token, with two adapters and $d = 2$. This $Q$ asks for the first dimension:

# %%
h, z_1, z_2 = torch.tensor([1.0, 0.5]), torch.tensor([0.8, 0.2]), torch.tensor([-0.4, 0.6])
Q, K, V = torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.eye(2), torch.eye(2)
scores = torch.stack([(Q @ h) @ (K @ z) for z in (z_1, z_2)])  # of each adapter one
s = scores.softmax(0)
o = s[0] * (V @ z_1) + s[1] * (V @ z_2)
steps = {"h": h, "z_1": z_1, "z_2": z_2, "Q h": Q @ h, "scores": scores, "s": s, "o": o}
tabulate([[name, *x.tolist()] for name, x in steps.items()], ["", "first", "second"])

# %% [markdown]
# $z_1$ has more of it, so $o$ is mostly $z_1$. All tokens and $N$ adapters at once:

# %%
show(Fusion.textbook, Fusion.softmax)

# %% [markdown]
# $V$ starts as the identity (1e-6 off its diagonal), so $o$ starts as $\sum_n s_n z_n$, a mixture
# of what the adapters put out. $Q$ and $K$ start at random, and so does $s$: nearly even where $d$
# is small, less so in a wide encoder, since the scores grow with $d$, and nothing divides them by
# $\sqrt d$. Four new adapters, 100 random tokens:

# %%
rows = []
for d in (48, 384, 768):
    adapters = [Adapter(AdapterConfig.pfeiffer(), d, d // 16) for _ in range(4)]
    fusion, h = Fusion([*"abcd"], d, dropout=0.0), F.layer_norm(torch.randn(1, 100, d), [d])
    with torch.no_grad():
        o, s = fusion.textbook(h, adapters), fusion.s  # [B, T, d], [B, T, N]
        mixture = sum(s[..., n, None] * adapter.z(h) for n, adapter in enumerate(adapters))
    rows.append([d, f"{s.min():.2f} to {s.max():.2f}", f"{(o - mixture).norm() / o.norm():.6f}"])
tabulate(rows, ["d", "s", "‖o − Σ s z‖ / ‖o‖"])

# %% [markdown]
# *Where the paper is silent* the code follows the library, too: $z_n$ is the adapter's output
# without its residual, which is added after the fusion; $Q$ and $K$ have biases; dropout is applied
# to the scores. More: [silent.md](silent.md).
#
# In the encoder, `forward` finds $h$, and closes the sub-layer with the two halves of an adapter's
# own `forward`. `h_and_residual` decides what the query is: read literally, the text's "output of
# the feedforward sub-layer" is $f$; the authors' library and this code take $\mathrm{LN}(f + x)$, as
# the text does if a sub-layer includes its Add & Norm.

# %%
show(Fusion.forward, Adapter.h_and_residual, Adapter.close)

# %% [markdown]
# ### The same function, without the price of $N$ adapters
#
# *This is not in the paper, and can be skipped: section 4 does not need it. It is why `forward`
# above may call `low_rank`: wherever that gives what `textbook` gives.* As written, $K$ and $V$ are
# multiplied with every $z_n$: $2Nd^2$ multiply-adds a token. But a dot product lets $K$ move to the
# query, a sum lets $V$ move behind it, and $z_n$ has only $r$ dimensions of its own. So $K$ and $V$
# are applied once, and no $z_n$ is formed:
#
# $$\begin{aligned}
# (Qh) \cdot (K z_n) &= (K^\top Q h) \cdot z_n\\
# \textstyle\sum_n s_n V z_n &= \textstyle V \sum_n s_n z_n\\
# z_n &= U_n a_n + b_n
# \end{aligned}$$
#
# ![The matrices of the low-rank form](figures/low_rank.svg)

# %%
show(low_rank)

# %% [markdown]
# With the docstring's two adapters, in float64, the two forms agree:

# %%
d = 48
adapters = [Adapter(AdapterConfig.pfeiffer(), d, r).double() for r in (2, 1)]
fusion = Fusion(["a", "b"], d, dropout=0.0).double()
parameters = [p for module in (*adapters, fusion) for p in module.parameters()]
for p in parameters:
    torch.nn.init.normal_(p, std=0.2)
h, results = torch.randn(4, 10, d, dtype=torch.float64), []
for form in ("textbook", "joint"):
    o = fusion.textbook(h, adapters) if form == "textbook" else low_rank(fusion, h, adapters, form)
    results.append([o.detach(), fusion.s, *torch.autograd.grad(o.sin().sum(), parameters)])
difference = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
print(f"the largest difference of outputs, weights and gradients: {difference:.1e}")
assert difference < 1e-10

# %% [markdown]
# ## 4 Experiments
#
# ### 4.1 Setup
#
# AdamW, a learning rate that falls linearly to 0, early stopping on the development set. $V$ is
# regularised by an l2 norm; its distance from *what* is left open, and the library takes the
# identity: $L_m + 0.01 \sum_l \lVert V_l - I \rVert_F^2$. Batch size and patience are not given;
# ours are 32, and 5 epochs.

# %%
show(fusion_regularization)

# %% [markdown]
# ### 4.2 Tasks
#
# Sixteen tasks, all in the table `TASKS` of `data.py`. An example is *candidates and a label*:
# classification has one candidate and a score for each of $K$ labels, multiple choice a candidate
# and one score for each choice.
#
# **Now for real**: what a stage adds to the encoder; the loss of a batch and its gradients; and the
# step that all stages share. A batch may be split, over several GPUs or by `micro_batches` into parts
# that fit into memory: each part's `share` is its fraction of the examples, and the gradients of all
# are added up. Without that, there is one part, whose share is 1. `compute` is `gradients` (or, with
# `--cuda-graphs`, a recording of it). `reseed` makes dropout a function of the step, so that a run
# that was interrupted goes on as it would have.

# %%
show(train.build, train.gradients)
show(train.minimize, first="for model, task, examples", last="run.after_step(loss)")

# %% [markdown]
# The next cell trains the 18 models of `make demo`, each by `train.py` in a process of its own. Eight
# are the sources' adapters (stage 1, two epochs, 2,400 examples for `match` and `order`, 800 for the
# others). Ten are five systems on the target, with two seeds; a seed draws 480 examples, the same for
# all five. Their logs are in `runs/walkthrough/logs`.
#
# - *The target's own adapter*. In section 3.1 it is one of the adapters that are fused; here it is not.
# - *A new head on* `order`: that adapter stays frozen; nothing is composed.
# - *The sum* of the eight, $o = \sum_n z_n$, of which only the head is trained; *even weights*,
#   $o = V \frac1N \sum_n z_n$; and *attention*.
#
# Accuracies are on 400 development examples, which also choose the best epoch. Chance is 25 %. A model
# that answers one question with accuracy $a$ and guesses the other is right in about $a / 2$ of the
# cases, one with both skills in $a_1 a_2$.

# %%
skills, rows = quietly(demo.train_all, demo.parse(RUNS))
print({skill: f"{accuracy:.1%}" for skill, accuracy in skills.items()}, "on their own tasks")
one, both = max(skills.values()) / 2, skills["match"] * skills["order"]
print(f"the target with one skill: about {one:.0%}, with both: about {both:.0%}")

# %% [markdown]
# ## 5 Results
#
# The paper's hypothesis: if at least one task supports the target, fusion gains; if none does, the
# performance stays the same.

# %%
tabulate(*study.table(rows))
print(demo.verdict(rows))

# %% [markdown]
# Attention is ahead because it leaves out what is not needed: the sum and even weights cannot. The
# target is made for that, so such a gain is not typical, and two seeds say little of others: some
# *lock* onto one skill. Why, and what happens on real tasks: [results.md](results.md).
#
# ## 6 What the fusion has learned
#
# The paper's Figure 4: the mean weights $s$ of every layer over the development set, in the last layer
# at `[CLS]`: the head reads no other token of it, so only there was that layer's fusion trained.

# %%
run = load_run(demo.fusions(RUNS)[0])
means = torch.stack([*mean_weights(run, run.split()).values()])  # [layers, N]
layers = [f"layer {i + 1}" for i in range(len(means))]
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
figure.colorbar(heat_map(axes, means, layers, run.adapters), ax=axes)
plt.show()

# %% [markdown]
# And by token, in all layers but the last: the weight of `match` in one example.

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
# The outlook cites Rücklé et al. (2020): adapters with small weights can be removed after training
# with almost no loss. To remove one is to build a fusion of the others with the same $Q$, $K$, $V$.
# Here six can be spared, and neither of the other two:

# %%
examples, every = run.split(), run.adapters
for left in (every, ["match", "order"], ["match"], ["order"]):
    trained = {key: slot.fusion.state_dict() for key, slot in run.bert.slots.items() if slot.fusion}
    add_fusion(run.bert, left)
    for key, weights in trained.items():
        run.bert.slots[key].fusion.load_state_dict(weights)
    scores = train.evaluate(run.model, run.task, examples, run.args)
    names = "all eight" if left == every else " and ".join(left)
    print(f"{names:16} accuracy {scores['accuracy']:.1%}")

# %% [markdown]
# ## A fork: scores over $\sqrt d$
#
# The scores of section 3.2 are sums of $d$ products, and nothing divides them by $\sqrt d$, as the
# attention in BERT does. Four lines at the end of `fusion.py` do, and `--fusion scaled` chooses them:
#
# ```diff
# --- fusion.py
# +class Scaled(Fusion):
# +    def softmax(self, q_k):
# +        return super().softmax(q_k / self.query.in_features**0.5)
# +FUSIONS["scaled"] = Scaled
# ```
#
# `low_rank` calls `softmax`, too, so the fork is as fast, and `train.py` trains, saves and loads it
# like the paper's fusion. What both get on test examples, each at the learning rate that is best for
# it on the development set:

# %%
rates, rows = root / "results" / "rates.csv", []  # without the file there is no table
found = pd.read_csv(rates) if rates.is_file() else None
for setting, of in [] if found is None else found.groupby("setting", sort=False):
    tests = []
    for way in ("attention", "scaled"):
        of_way = of[of["way"] == way]
        lr = of_way.groupby("lr")["best_dev"].mean().idxmax()
        tests.append(100 * of_way[of_way["lr"] == lr].set_index("seed")["best_test"])
    means = [f"{of_seeds.mean():.1f}" for of_seeds in tests]
    rows.append([setting, len(tests[0]), *means, with_interval(tests[1] - tests[0])])
if rows:
    tabulate(rows, ["setting", "seeds", "paper's", "over √d", "difference (95 %)"])

# %% [markdown]
# **From here.** Your own task: [python.md](python.md). Your own idea: [forking.md](forking.md).
