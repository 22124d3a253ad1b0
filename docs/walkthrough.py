# %% [markdown]
# # AdapterFusion, section by section
#
# This page reads [Pfeiffer et al., *AdapterFusion: Non-Destructive Task Composition for Transfer
# Learning* (EACL 2021)](https://arxiv.org/abs/2005.00247) with the code beside it: what a section
# says, its equation, and the lines of the repository that compute it. `make walkthrough` runs the
# page, in minutes on a laptop.
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
# as a Python package, and three tasks are made of docstrings. An example is a docstring's sentence
# and a name, with two possible faults: the name is another docstring's, or the words are shuffled.
#
# - `match`: does the name belong to the sentence? (Python's library and PyTorch)
# - `order`: are the words in order? (the same)
# - `both`, the target: which of the four cases is it? (NumPy; 240 training examples)
#
# In each source the other fault occurs in half of the examples, independently of the label, so a
# source teaches one skill; the target needs both. Four more sources teach what it does not need: is
# *the*, is *of* among the words (`the`, `of`), are they more than seven (`long`), has the name two
# words (`two_words`)? Nobody says which of the six to use.

# %%
demo.build_tasks(RUNS / "data", random.Random(0))
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
# with a tuple of names their fusion (section 3).
#
# ## 2.1 What goes wrong without adapters
#
# *Sequential fine-tuning* (`train.py --stage full`) trains all of $\Theta$ on one task after
# another, and nothing protects what earlier ones have taught. *Multi-task learning*
# (`experiments/multitask.py --without-adapters`) needs all data at once, has to balance the tasks,
# and starts over for each new one.
#
# ## 2.2 Adapters
#
# An adapter is a small network inside every layer of an encoder that stays as it is.
#
# ![Left: what was searched over (2.2.3). Right: the paper's own](figures/figure5.svg)
#
# The paper's own (right) sits after the feed-forward sub-layer. $D$ and $b_D$ project down to $r$
# dimensions, a non-linearity follows, and $U$ and $b_U$ project up to $d$.
#
# $$\begin{aligned}
# h &= \mathrm{LN}(f + x)\\
# z &= U\,\mathrm{act}(D h + b_D) + b_U\\
# \text{output} &= \mathrm{LN}(f + z + x)
# \end{aligned}$$

# %%
show(Adapter.forward, Adapter.z, Adapter.bottleneck)

# %% [markdown]
# Both LayerNorms are one, BERT's own. New weights are small, so training starts near BERT.

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
# $\Theta$ is fixed, and each adapter $\Phi_n$ is trained by itself on its task's data, here $D_n$:
#
# $$\Phi_n \leftarrow \operatorname*{argmin}_\Phi L_n(D_n; \Theta_0, \Phi)$$
#
# A prediction head, which the paper does not describe, is trained with it. Here it is AdapterHub's:
# dropout, linear, tanh, dropout, linear, on the last layer's `[CLS]` vector. ($C$ is the number of
# candidates of an example, 1 unless it is multiple choice.)

# %%
show(Head.forward)

# %% [markdown]
# Here is that argmin in a few lines. `train()` in `train.py` adds a schedule, early stopping,
# clipping and checkpoints, and keeps dropout on in the frozen $\Theta$, as the authors' library
# does. These 50 steps are too few for `order`, which stays near chance; section 4 takes 300.


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
# The arrow marks weights trained further from $\Theta_0$ on tasks $1, \ldots, N$. Either kind can
# be fused; this page fuses single-task adapters.
#
# ### 2.2.3 and appendix A.2: which architecture?
#
# Where, how many, which LayerNorms, residual, $r$, non-linearity? The paper's grid search has the
# same winner on three tasks: one adapter after the feed-forward sub-layer, between BERT's own
# LayerNorm applied twice (`experiments/architecture_search.py`).
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
# title. $\Psi$ costs three $d \times d$ matrices and two biases per layer, whatever $N$ and $r$.

# %%
add_adapter(bert, "match", AdapterConfig.pfeiffer(reduction_factor=16))
fit_on("match", limit=320)
add_fusion(bert, ["match", "order"])
before = {name: p.clone() for name, p in bert.named_parameters()}
head, _ = fit_on("both", limit=240)
moved = {name for name, p in bert.named_parameters() if not torch.equal(p, before[name])}
theta = {name for name in before if bert.hub_name(name)}  # None for what is plugged into Θ
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
# $n \in \{1, \ldots, N\}$ counts. Its query is what the adapters read; keys and values are made
# from their outputs:
#
# $$\begin{aligned}
# s_{l,t} &= \operatorname{softmax}_n\left(h_{l,t}^\top Q_l \otimes z_{l,t,n}^\top K_l\right)\\
# z'_{l,t,n} &= z_{l,t,n}^\top V_l\\
# Z'_{l,t} &= [z'_{l,t,1}, \ldots, z'_{l,t,N}]\\
# o_{l,t} &= s_{l,t}^\top Z'_{l,t}
# \end{aligned}$$
#
# $\otimes$ is the dot product. The paper multiplies rows, $h^\top Q$; `nn.Linear` multiplies
# columns, $Wh$ with $W = Q^\top$: in the code, and from here on, $Q$, $K$ and $V$ are these $W$.
#
# First one token, with two adapters and $d = 2$. This $Q$ asks for the first dimension:

# %%
h, z_1, z_2 = torch.tensor([1.0, 0.5]), torch.tensor([0.8, 0.2]), torch.tensor([-0.4, 0.6])
Q, K, V = torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.eye(2), torch.eye(2)
scores = torch.stack([(Q @ h) @ (K @ z) for z in (z_1, z_2)])  # one per adapter
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
# is small, less so in a wide encoder. $Q$, $K$ and the adapters start with the same deviation,
# 0.02, at any $d$, so the scores grow with $d$. Four new adapters, 100 random tokens:

# %%
rows = []
for d in (48, 384, 768):
    adapters = [Adapter(AdapterConfig.pfeiffer(), d, d // 16) for _ in range(4)]
    fusion, h = Fusion([*"abcd"], d, dropout=0.0), F.layer_norm(torch.randn(1, 100, d), [d])
    fusion.textbook(h, adapters)
    rows.append([d, f"{fusion.s.min():.2f} to {fusion.s.max():.2f}"])
tabulate(rows, ["d", "s"])

# %% [markdown]
# *Where the paper is silent* the code follows the library: $z_n$ is the adapter's output without
# the residual $f$, which is added after the fusion; $Q$ and $K$ have biases; dropout is applied to
# the scores. More: [silent.md](silent.md).
#
# In the encoder, `forward` gets $h$ from an adapter's `h_and_residual`, and ends in its `close`. So
# the query is $h = \mathrm{LN}(f + x)$, as in the authors' library. The text's "output of the
# feedforward sub-layer" could also mean $f$.

# %%
show(Fusion.forward, Adapter.h_and_residual, Adapter.close)

# %% [markdown]
# ### The same function, without the price of $N$ adapters
#
# *This is not in the paper, and section 4 does not need it. It is why `forward` above may call
# `low_rank`.* As written, $K$ and $V$ are multiplied with every $z_n$: $2Nd^2$ multiply-adds per
# token. But $K$ can move to the query, and $V$ out of the sum; and with $a_n$ the adapter's
# bottleneck after the non-linearity, $z_n$ is a function of $r$ numbers. So $K$ and $V$ are applied
# once, and no $z_n$ is formed. Both forms are compared when a fusion is added; where they differ,
# `textbook` is used.
#
# $$\begin{aligned}
# (Qh) \cdot (K z_n) &= (K^\top Q h) \cdot z_n\\
# \textstyle\sum_n s_n V z_n &= \textstyle V \sum_n s_n z_n\\
# z_n &= U_n a_n + b_{U,n}
# \end{aligned}$$
#
# ![The matrices of the low-rank form](figures/low_rank.svg)

# %%
show(low_rank)

# %% [markdown]
# ## 4 Experiments
#
# ### 4.1 Setup
#
# AdamW, a learning rate that falls linearly to 0, early stopping on the development set. $V$ is
# regularised by an l2 norm. The paper does not say of what; the library takes $V - I$:
# $L_m + 0.01 \sum_l \lVert V_l - I \rVert_F^2$.

# %%
show(Fusion.penalty, fusion_regularization)

# %% [markdown]
# ### 4.2 Tasks
#
# Sixteen tasks, all in the table `TASKS` of `data.py`. An example is *candidates and a label*:
# classification has one candidate and a score for each of $K$ labels, multiple choice a candidate
# and one score for each choice.
#
# ### Now for real
#
# What a stage adds to the encoder, the loss of a batch with its gradients, and the step common to
# all stages. `run` is the training's state, `plan` an epoch's batches, `lrs` the initial learning
# rates, `compute` is `gradients`. To save memory, or on several GPUs, a batch is split and the
# parts' gradients are added up; `share` is a part's fraction of the examples, here 1. `reseed`
# makes dropout a function of the step, so that an interrupted run resumes exactly.

# %%
show(train.build, train.gradients)
show(train.minimize, first="for model, task, examples", last="run.after_step(loss)")

# %% [markdown]
# The next cell trains the 16 models of `make demo`, each by `train.py` in a process of its own. Six
# are the sources' adapters (stage 1, two epochs of 2,400 examples). Ten are five systems on the
# target, each with two seeds, which draw 240 examples.
#
# - *The target's own adapter*. The paper fuses it, too; here it is left out.
# - *A new head on* `order`: that adapter stays frozen; nothing is composed.
# - *The sum* of the six, $o = \sum_n z_n$, of which only the head is trained; *even weights*,
#   $o = V \frac1N \sum_n z_n$; and *attention*.
#
# Accuracies, in % (mean ± standard deviation), are on 400 development examples, which also choose
# the best epoch; each system is trained at a learning rate that did well with other seeds. Chance
# is 25 %. A model that answers one question with accuracy $a$ and guesses the other is right in
# about $a / 2$ of the cases, one with both skills in $a_1 a_2$.

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
lines, header = study.table(rows)
tabulate([[line[0], *line[3:]] for line in lines], [header[0], *header[3:]])

# %% [markdown]
# The last column is attention minus that row. Attention is ahead of all of these. Even weights have
# only $V$ to repair what four unneeded adapters add; the sum takes their outputs in full, and three
# of them are the longest (at the token of section 3.2). That $s$ depends on the token gives little
# here: static weights, a trained number for each adapter and layer, are 1.4 points behind in bfloat16
# (−0.2 to 3.1, ten seeds) and 1.5 in float32 (0.3 to 2.7). On other targets, or at other rates, some
# seeds *lock*: the fusion learns only one of the skills. Why, and what happens on real tasks:
# [results.md](results.md).
#
# ## 6 What the fusion has learned
#
# As in the paper's Figure 6, the mean weights $s$ of every layer over the development set; in the
# last layer only at `[CLS]`, the one token that the head reads. `order` leads in layers 1, 2 and 4,
# `match` in 3. The last `[CLS]` gives `order` nearly all where the words are intact, and the four
# others most of it where they are shuffled: there, $s$ itself carries a part of the answer.

# %%
run = load_run(demo.fusions(RUNS)[0])
means = torch.stack([*mean_weights(run, run.split()).values()])  # [layers, N]
layers = [f"layer {i + 1}" for i in range(len(means))]
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
figure.colorbar(heat_map(axes, means, layers, run.adapters), ax=axes)
plt.show()

# %% [markdown]
# ## 8.2 Fewer adapters
#
# The outlook cites Rücklé et al. (2020): adapters with small weights can be removed after training
# with almost no drop in accuracy. Removing one means building a fusion of the others with the same
# $Q$, $K$, $V$. Here the drop is not small: without the four, whose weights tell shuffled from
# intact (section 6), this fusion loses 7 points. Losing one of the two that are left costs more:

# %%
examples, every, rows = run.split(), run.adapters, []
for left in (every, ["match", "order"], ["match"], ["order"]):
    trained = {key: slot.fusion.state_dict() for key, slot in run.bert.slots.items() if slot.fusion}
    add_fusion(run.bert, left)
    for key, weights in trained.items():
        run.bert.slots[key].fusion.load_state_dict(weights)
    scores = train.evaluate(run.model, run.task, examples, run.args)
    names = "all six" if left == every else " and ".join(left)
    rows.append([names, f"{scores['accuracy']:.1%}"])
tabulate(rows, ["fused", "accuracy"])

# %% [markdown]
# ## A fork: scores over $\sqrt d$
#
# Four lines at the end of `fusion.py` divide the scores of section 3.2 by $\sqrt d$, as the
# attention inside BERT does; `--fusion scaled` selects them:
#
# ```diff
# --- fusion.py
# +class Scaled(Fusion):
# +    def softmax(self, q_k):
# +        return super().softmax(q_k / self.query.in_features**0.5)
# +FUSIONS["scaled"] = Scaled
# ```
#
# `low_rank` calls `softmax`, too, so it is as fast. Test accuracy, fusing `match` and `order` alone,
# beside others, and on `asked`, at the rate best for other seeds; each interval includes 0:

# %%
found, rows = pd.read_csv(root / "results" / "rates.csv"), []
for setting, of in found.groupby("setting", sort=False):
    paper, scaled = (at_chosen_rates(of[of["way"] == way]) for way in ("attention", "scaled"))
    row = [setting, len(paper), f"{paper.mean():.1f}", f"{scaled.mean():.1f}"]
    rows.append([*row, with_interval(scaled - paper)])
tabulate(rows, ["setting", "seeds", "paper's", "over √d", "difference (95 %)"])

# %% [markdown]
# **From here.** Your own task: [python.md](python.md). Your own idea: [forking.md](forking.md).
