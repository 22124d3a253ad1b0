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
# Learning* (EACL 2021)](https://arxiv.org/abs/2005.00247) with the code beside it. For each section
# it says, in our words, what the paper says; gives the equation; shows the lines of this
# repository that compute it; sends numbers through them; and names what the paper leaves open.
#
# All code is read live from the repository's files. What is printed under a cell was computed by
# that cell. A number that stands in the text is the paper's, and says so. The adapters and fusions
# are really trained, on a laptop's processor, in a few minutes: `make walkthrough` runs the page
# again from nothing. Its source is `docs/walkthrough.py`.
#
# **Notation.** $B$ examples, $T$ tokens, $d$ the hidden size, $r$ the size of an adapter's
# bottleneck, $N$ adapters. $\Theta$ is the pretrained encoder, $\Phi_n$ the adapter of task $n$,
# $\Psi$ the fusion.

# %%
from page import *  # the repository's own names, and `show`, which prints their source

# %matplotlib inline
RUNS = Path("runs/walkthrough")

# %% [markdown]
# **The whole idea in one paragraph.** Put a small network, an *adapter*, into every layer of a
# pretrained encoder and train nothing but the adapter on task 1. Take another adapter for task 2,
# and so on. Each adapter knows its task, and none has changed the encoder or another adapter. Then
# take a task with little data, put all the adapters into the encoder at once, freeze them, and train
# an *attention over adapters* in every layer: for each token it decides which adapters to listen
# to. That attention is AdapterFusion.
#
# ## 2 Background: what is given
#
# A pretrained encoder $\Theta_0$, and a set of tasks $C = \{(D_1, L_1), \ldots, (D_N, L_N)\}$, each
# with labelled data and a loss. One of them, $m$, is the *target*: the aim is to do better on it
# with the help of the others.
#
# The paper has BERT-base and sixteen tasks. Here the encoder is MiniLM-L6, a small BERT that comes
# as a Python package, and there are three tasks, those of `make demo`, built from the docstrings on
# this machine. An example is a sentence and a name, and may be wrong in two ways: the name is that
# of another docstring, and the sentence's words are shuffled.
#
# - `match`: does the name belong to the sentence? (Python's standard library and PyTorch)
# - `order`: are the words in their order? (the same libraries)
# - `both`, the target: which of the four? (NumPy, with 240 training examples, drawn with the seed)
#
# In `match` half of the sentences are shuffled, in `order` half of the names are wrong, and neither
# says anything about the label. So either source teaches one skill and gives no reason to learn the
# other; the target needs both.

# %%
model = "minilm"
build_tasks(RUNS / "data", random.Random(0), demo.SKILLS)
rows, sizes = [], {}
for name in (*demo.SKILLS, "both"):
    path = RUNS / "data" / name / "train.jsonl"
    examples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    sizes[name] = 240 if name == "both" else len(examples)
    kinds = {row["label"]: row for row in examples}.values()  # an example of each label
    rows += [[name, sizes[name], row["text_a"], row["text_b"], row["label"]] for row in kinds]
tabulate(rows, ["task", "training examples", "sentence", "name", "label"])

# %% [markdown]
# The encoder reads batches of token ids and returns a vector for every token. It is loaded frozen:
# no parameter requires a gradient.

# %%
bert = Bert.from_pretrained(model)
tokenizer = load_tokenizer(bert.directory, max_length=40)
encoding = tokenizer.encode("Return the cumulative sum.", "The axis is optional.")
ids, types = torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids])
plain = bert(ids, types)
print(*encoding.tokens)
print("ids        [B, T]   ", tuple(ids.shape), ids[0, :7].tolist(), "...")
print("types      [B, T]   ", tuple(types.shape), types[0].tolist())
print("bert(ids)  [B, T, d]", tuple(plain.shape), "of [CLS]:", plain[0, 0, :5])
print("parameters of Θ that require a gradient:", sum(p.requires_grad for p in bert.parameters()))

# %% [markdown]
# A layer of BERT is self-attention and a feed-forward network, each followed by *Add & Norm*: the
# sub-layer's output $f$ is added to its input $x$, and the sum is normalised. This is the layer,
# and its *Add & Norm*, a module of its own because everything in the paper happens there:

# %%
show(Layer.forward, AddNorm.forward)

# %% [markdown]
# The last line of `AddNorm.forward` is BERT. The lines above it are this page: an adapter, or a
# fusion of several, in place of plain addition.
#
# ## 2.1 What goes wrong without adapters
#
# ### 2.1.1 Sequential fine-tuning
#
# Train all of $\Theta$ on one task after another, each time starting where the last one ended,
#
# $$\Theta_{0 \to 1} \leftarrow \operatorname*{argmin}_\Theta L_1(D_1; \Theta_0), \qquad
#   \Theta_{0 \to 1 \to 2} \leftarrow \operatorname*{argmin}_\Theta L_2(D_2; \Theta_{0 \to 1}), \quad \ldots$$
#
# and nothing protects what the earlier tasks have learned: the network may forget it (*catastrophic
# forgetting*). To see it, we fine-tune the whole encoder on `match`, then on `order`, and then ask
# the `match` head again, on top of the encoder as it is now. The learning rate is 2e-4, ten times
# this project's default for full fine-tuning, because one epoch is only 50 steps here; a smaller
# one forgets less, and learns less.

# %%
full = "--stage full --epochs 1 --lr 2e-4 --limit-train 800 --batch-size 16 --overwrite".split()
full += ["--max-length", "40", "--data-dir", str(RUNS / "data")]


def fine_tune(task, encoder):
    words = ["--task", task, "--model", str(encoder), "--out", str(RUNS / f"full-{task}")]
    return quietly(train.main, [*full, *words])["accuracy"]


def accuracy(bert, head, task, split):
    return train.evaluate(train.Model(bert, head), task, split, 64)["accuracy"]


before = fine_tune("match", model)
second = fine_tune("order", RUNS / "full-match")
run = load_run(RUNS / "full-match")  # its head, on the encoder that `order` has moved
moved = Bert.from_pretrained(RUNS / "full-order")
task, split = run.task, run.split()
after = accuracy(moved, run.head, task, split)
share = max(split["label"].count(i) for i in range(2)) / len(split)
print(f"`order` after its own training {percent(second)}")
print(f"`match` before that {percent(before)}, after it {percent(after)}")
print(f"always answering with the most frequent class: {percent(share)}")

# %% [markdown]
# ### 2.1.2 Multi-task learning
#
# Train on all tasks at once,
#
# $$\Theta_{0 \to \{1, \ldots, N\}} \leftarrow \operatorname*{argmin}_\Theta \sum_{n=1}^{N} L_n(D_n; \Theta_0).$$
#
# Now all data must be there at the same time, a new task means training everything again, and
# somebody has to decide how often each task is seen.

# %% [markdown]
# ## 2.2 Adapters
#
# An adapter is a small network inside every layer of the encoder, which itself stays as it is.
#
# ![Where adapters sit, and what is inside the paper's own](figures/figure5.svg)
#
# The paper's own architecture (on the right) is one adapter per layer, after the feed-forward
# sub-layer: down to $r$ dimensions, a non-linearity, up again to $d$. With $f$ the sub-layer's
# output and $x$ its input,
#
# $$h = \mathrm{LN}(f + x), \qquad z = U\,\mathrm{act}(D h + b_D) + b_U, \qquad \text{output} = \mathrm{LN}(f + z + x)$$

# %%
show(Adapter.inputs, Adapter.z, Adapter.add_and_norm, Adapter.forward)

# %% [markdown]
# Two tokens with $d = 6$ on their way through an adapter with a bottleneck of $r = 2$. Follow a row:
# $f + x$ is normalised, squeezed into two numbers, of which the ReLU keeps what is positive, and
# spread over six again. Where both are negative nothing is kept, and $z$ is zero: the adapter has
# nothing to say about this token. With $r = 2$ that happens often, with the paper's 48 hardly ever.

# %%
d, r = 6, 2
adapter, norm = Adapter(AdapterConfig.pfeiffer(), d, r), torch.nn.LayerNorm(d)
f, x = torch.randn(1, 2, d), torch.randn(1, 2, d)
with torch.no_grad():
    h, residual = adapter.inputs(f, x, norm)
    bottleneck = adapter.act(adapter.down(h))
    z = adapter.z(h)
    output = adapter.add_and_norm(z + residual, x, norm)
named = {
    "f": f,
    "x": x,
    "h = LN(f + x)": h,
    "act(D h + b_D)": bottleneck,
    "z, in thousandths": 1000 * z,
}
for name, tensor in {**named, "LN(f + z + x)": output}.items():
    print(f"{name}  {tuple(tensor.shape)}\n{tensor[0]}")
assert torch.equal(output, adapter(f, x, norm)) and torch.equal(output, norm(f + z + x))

# %% [markdown]
# $z$ is nearly zero, because the weights of a new adapter are drawn from $\mathcal N(0, 0.02^2)$. So
# training starts near BERT as it was pretrained. How little a new adapter in every layer changes
# the encoder's output, and how little there is to train:

# %%
add_adapter(bert, "order", AdapterConfig.pfeiffer(reduction_factor=16))


def change():
    """How far the encoder's output is from that of plain BERT, relative to its length."""
    with torch.no_grad():
        return ((bert(ids, types) - plain).norm() / plain.norm()).item()


print(f"a new adapter in every layer changes the encoder's output by {percent(change())}")
theta = sum(bert.get_parameter(name).numel() for name in bert.checkpoint_names)
phi = {name: p for name, p in bert.named_parameters() if p.requires_grad}
size = sum(p.numel() for p in phi.values())
print(f"Θ has {theta:,} parameters, Φ {size:,} ({size / theta:.1%}); in the first layer:")
for name, p in phi.items():
    if name.startswith("layers.0."):
        print(f"  {name:55} {tuple(p.shape)}")

# %% [markdown]
# *Where the paper is silent*, this follows its authors' library: the LayerNorm is the encoder's
# own, used twice; biases start from 0; the residual of the adapter is $f$.
#
# ### 2.2.1 Single-task adapters (ST-A)
#
# $\Theta$ is fixed, and each adapter is trained by itself:
#
# $$\Phi_n \leftarrow \operatorname*{argmin}_\Phi L_n(D_n; \Theta_0, \Phi)$$
#
# Here is that argmin in ten lines. Everything else in `train.py` is care around them.


# %%
def fit(bert, head, split, lr):
    """One epoch. What is trained is what requires a gradient, and nothing else says so."""
    trained = [p for p in (*bert.parameters(), *head.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr, weight_decay=0)
    for batch in batches(split, batch_size=16, seed=0):
        mask = batch["attention_mask"]
        h = bert(batch["input_ids"], batch["token_type_ids"], mask)  # [B, T, d]
        loss = F.cross_entropy(head(h, mask), batch["labels"])
        loss = loss + fusion_regularization(bert)  # section 4.1; 0 until there is a fusion
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def prepare(name, limit=None):
    """A task, its two splits, and a new head."""
    task = get_task(name, RUNS / "data")
    load = lambda split, limit: load_split(task, split, tokenizer, RUNS / "data", limit)
    head = Head({**task.type.head(task.labels), "layers": 2}, bert.config)
    return task, load("train", limit), load("validation", None), head


task, train_split, dev_split, head = prepare("order", limit=800)
untrained = accuracy(bert, head, task, dev_split)
fit(bert, head, train_split, lr=5e-4)
trained = accuracy(bert, head, task, dev_split)
print(f"`order`: {percent(untrained)} before, {percent(trained)} after one epoch of its adapter,")
print(f"which now changes the encoder's output by {percent(change())}")

# %% [markdown]
# ### 2.2.2 Multi-task adapters (MT-A)
#
# Stickland and Murray (2019) train the adapters of all tasks together, *and the encoder with them*:
#
# $$\Theta \leftarrow \operatorname*{argmin}_{\Theta, \Phi} \sum_{n=1}^N L_n(D_n; \Theta_0, \Phi_n),
#   \qquad \Theta = \Theta_{0 \to \{1, \ldots, N\}}, \Phi_1, \ldots, \Phi_N$$
#
# Every step draws a task, switches to its adapter, and moves $\Theta$ and that adapter. Task $n$ is
# next with a probability $\propto |D_n|^\alpha$, where $\alpha$ falls from 1 to 0.2 in the course of
# training: large tasks dominate the beginning only.

# %%
show(MultitaskModel.of_task, task_probabilities)
epochs = [1, 13, 25]
p = [task_probabilities(list(sizes.values()), "annealed", epoch, 25) for epoch in epochs]
tabulate(
    [[name, size, *(float(q[n]) for q in p)] for n, (name, size) in enumerate(sizes.items())],
    ["task", "examples", *(f"probability in epoch {epoch} of 25" for epoch in epochs)],
)

# %% [markdown]
# `python -m experiments.multitask --tasks ...` is this. The paper compares fusion with it, and also
# fuses its adapters (the columns *MT-A* and *Fusion w/ MT-A* of Table 1). Their adapter is *PAL*, a
# small self-attention parallel to the layer: `variants/pal.py`.
#
# ### 2.2.3 Adapters in practice, and appendix A.2: which architecture?
#
# Where in the layer, how many, which LayerNorms, which residual, which $r$, which non-linearity?
# Appendix A.2 tries a grid on three tasks (SST-2, Argument, CommonsenseQA), one question after the
# other, and finds the same winner on all: one adapter, *on top* (after the feed-forward sub-layer),
# between BERT's own LayerNorm applied twice, without new LayerNorms. It is on a par with Houlsby et
# al.'s two adapters per layer at half the parameters. Every point of that grid is a configuration
# here:

# %%
rows = []
for name in ("pfeiffer", "houlsby", "bapna"):
    fresh = Bert.from_pretrained(model)
    add_adapter(fresh, "new", ADAPTERS[name]())
    size = sum(p.numel() for p in fresh.parameters() if p.requires_grad)
    default = AdapterConfig()
    changes = {
        key: value
        for key, value in vars(ADAPTERS[name]()).items()
        if value != getattr(default, key)
    }
    rows.append(
        [name, f"{size:,}", ", ".join(f"{k}={v}" for k, v in changes.items()) or "the defaults"]
    )
tabulate(rows, ["--adapter", "parameters", "as an AdapterConfig"])

# %% [markdown]
# The first question of the grid, the position, as [this project measured it](results.md) with MiniLM
# on SST-2 and 2,000 training examples (one seed; the paper's curves are its Figure 7):

# %%
search = [row for row in read_table("results/search_sst2.csv") if row["step"] == "position"]
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for option, style in (("top", "o-"), ("bottom", "s--"), ("both", "^:")):
    points = [
        (int(r["reduction_factor"]), 100 * float(r["accuracy"]))
        for r in search
        if r["option"] == option
    ]
    axes.semilogx(*zip(*points, strict=True), style, label=option)
axes.set_xticks([2, 8, 16, 64], [2, 8, 16, 64])
axes.set(
    xlabel="reduction factor d / r", ylabel="accuracy, %", title="SST-2: where the adapter sits"
)
axes.minorticks_off()
axes.grid(alpha=0.3)
axes.legend()
plt.show()

# %% [markdown]
# At 16 and 64 *both* is ahead of *top*, but it is twice as large. At equal parameters, *both* at 16
# against *top* at 8, the answer is the paper's. Small adapters are behind here because these runs
# are short: in the paper's Table 3, trained to the end, the means of the reduction factors 2, 16 and
# 64 lie within 0.7 points.
#
# ## 3 AdapterFusion
#
# ### 3.1 Two stages
#
# **Knowledge extraction:** an adapter for each task, each by itself. **Knowledge composition:**
# $\Theta$ and all $\Phi_n$ are fixed, and new parameters $\Psi$ learn on the target task to combine
# them:
#
# $$\Psi_m \leftarrow \operatorname*{argmin}_\Psi L_m(D_m; \Theta, \Phi_1, \ldots, \Phi_N, \Psi)$$
#
# ![Figure 1: the fusion inside a layer](figures/figure1.svg)
#
# The claim is more than that the fusion finds the best adapter: it *composes* what separate tasks
# have taught. Our tasks are made to show that. With one skill alone a model can answer one of the
# target's two questions, and has to guess the other. Section 5 measures how far a fusion of the two
# adapters gets, and section 6 looks at what it listens to.
#
# In the paper the training data of $m$ are used twice, for its adapter $\Phi_m$ and for $\Psi_m$;
# here only the two sources are fused. The two stages are the same loop: `fit`, as it stands above,
# does the second one as soon as there is a fusion. We give the encoder a second adapter, fuse the
# two on the target, and compare every parameter before and after. This is the *non-destructive* of
# the paper's title:

# %%
add_adapter(bert, "match", AdapterConfig.pfeiffer(reduction_factor=16))
task, train_split, dev_split, head = prepare("match", limit=320)
fit(bert, head, train_split, lr=5e-4)

add_fusion(bert, ["match", "order"])
task, train_split, dev_split, head = prepare("both", limit=240)
before = {name: p.clone() for name, p in bert.named_parameters()}
fit(bert, head, train_split, lr=5e-4)
unchanged = {name: torch.equal(p, before[name]) for name, p in bert.named_parameters()}
parts = {"Φ of match": ".match.", "Φ of order": ".order.", "Ψ": ".fusion."}
rows = []
for part in ("Θ", *parts):
    of_part = [
        n for n in unchanged if (parts[part] in n if part in parts else n in bert.checkpoint_names)
    ]
    size = sum(bert.get_parameter(n).numel() for n in of_part)
    rows.append([part, f"{size:,}", len(of_part), sum(unchanged[n] for n in of_part)])
tabulate(rows, ["", "parameters", "tensors", "of these, bit for bit as before"])
assert all(same == (".fusion." not in name) for name, same in unchanged.items())

# %% [markdown]
# ### 3.2 The equations
#
# ![Figure 2: query, keys and values of the fusion](figures/figure2.svg)
#
# In every layer $l$ and for every token $t$, an attention decides how much each adapter
# contributes. The query is the hidden state that the adapters read; keys and values are made of
# the adapters' outputs:
#
# $$\begin{aligned}
# s_{l,t} &= \operatorname{softmax}_n\left(h_{l,t}^\top Q_l \otimes z_{l,t,n}^\top K_l\right), \quad n \in \{1, \ldots, N\}\\
# z'_{l,t,n} &= z_{l,t,n}^\top V_l\\
# Z'_{l,t} &= [z'_{l,t,1}, \ldots, z'_{l,t,N}]\\
# o_{l,t} &= s_{l,t}^\top Z'_{l,t}
# \end{aligned}$$

# %%
show(Fusion.textbook, Fusion.attend, Fusion.forward)

# %% [markdown]
# Three adapters, one sentence of two tokens, as a new fusion computes it. (A $z_n$ that is all zeros
# is again that of an adapter whose ReLU keeps nothing of the token; its score is zero, too.)

# %%
d, r = 6, 2
adapters = [Adapter(AdapterConfig.pfeiffer(), d, r) for _ in range(3)]
fusion = Fusion("a,b,c", ["a", "b", "c"], d, dropout=0.0)
with torch.no_grad():
    z = torch.stack([adapter.z(h) for adapter in adapters], 2)
    q, k = fusion.query(h), fusion.key(z)
    scores = torch.einsum("btd,btnd->btn", q, k)
    o = fusion.textbook(h, adapters)
print(
    f"z_1 ... z_N    [B, T, N, d]  {tuple(z.shape)}, of the first token, in thousandths\n{1000 * z[0, 0]}"
)
print(f"(Q h)·(K z_n)  [B, T, N]     {tuple(scores.shape)}, in millionths\n{1e6 * scores[0]}")
print(f"s              [B, T, N]     {tuple(fusion.weights.shape)}\n{fusion.weights[0]}")
print(
    f"o              [B, T, d]     {tuple(o.shape)}, of the first token, in thousandths\n{1000 * o[0, 0]}"
)
print(f"the mean of its z_n, in thousandths\n{1000 * z[0, 0].mean(0)}")

# %% [markdown]
# All weights are 0.333: $Q$, $K$ and $z$ start small, so the scores are millionths, and their
# softmax is even. $V$ starts as the identity, so $o$ starts as the mean of the adapters. *A fusion
# starts as an even ensemble of its adapters and learns from there which to trust.* Once the weights
# have grown, tokens differ in what they take. Here those of the same modules are drawn anew, with
# $\sigma = 0.4$; a row is a token, a column an adapter:

# %%
torch.manual_seed(1)
with torch.no_grad():
    for module in (*adapters, fusion.query, fusion.key):
        for p in module.parameters():
            p.normal_(std=0.4)
    fusion.textbook(h, adapters)
print(fusion.weights[0])

# %% [markdown]
# *Where the paper is silent*, this follows the library again: $z_n$ is the adapter's output
# *without* its residual, which is added after the fusion; $Q$ and $K$ have biases, $V$ has none;
# dropout is applied to the scores, before the softmax.
#
# *Where it follows the library against the text:* section 3.2 takes "the output of the feedforward
# sub-layer", $f$, as the query, and here it is $h = \mathrm{LN}(f + x)$; section 4.1 starts $V$ beside
# its diagonal with "random weights having a small norm", and here they are the constant $10^{-6}$.
# [silent.md](silent.md#where-we-follow-the-library-against-the-text) says what following the text
# changes.
#
# ### A fork: scaled scores
#
# The scores are plain dot products. Vaswani et al. (2017) divide theirs by $\sqrt d$. To compute
# that, derive from `Fusion` and change its one softmax. To train it takes three things more: a
# `file_tag`, which tells its files from those of the paper's fusion, `register`, which gives it a name
# for `--fusion`, and a call of `train.main`. [forking.md](forking.md) has the whole file.


# %%
class ScaledFusion(Fusion):
    def attend(self, scores):
        return super().attend(scores / self.query.in_features**0.5)


scaled = ScaledFusion("a,b,c", ["a", "b", "c"], d, dropout=0.0)
scaled.load_state_dict(fusion.state_dict())
with torch.no_grad():
    scaled.textbook(h, adapters)
print(
    f"the same adapters, query and key; as in the paper:\n{fusion.weights[0]}\nscaled:\n{scaled.weights[0]}"
)

# %% [markdown]
# ### The same function, without the price of $N$ adapters
#
# As written, $K$ and $V$ are multiplied with every $z_n$: $2Nd^2$ multiply-adds for a token. But a
# dot product lets $K$ move to the query, a sum lets $V$ move behind it, and $z_n$ has only $r$
# dimensions of its own:
#
# $$(Qh) \cdot (K z_n) = (K^\top Q h) \cdot z_n, \qquad \sum_n s_n V z_n = V \sum_n s_n z_n, \qquad z_n = U_n a_n + b_n$$
#
# So $K$ and $V$ are applied once, and no $z_n$ is ever formed. The bottlenecks $a_n$ of all adapters
# stand side by side, and a *membership* matrix of zeros and ones says which of them are whose:
#
# ![The matrices of the low-rank form](figures/low_rank.svg)

# %%
show(Fusion.low_rank)

# %% [markdown]
# **It is the same function.** In float64, with adapters of different sizes, the outputs and all
# gradients:

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
results = []
for form in (fusion.textbook, fusion.low_rank):
    o = form(h, adapters)
    results.append([o.detach(), fusion.weights, *torch.autograd.grad(o.sin().sum(), parameters)])
difference = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
o, s = results[0][:2]
print(f"outputs up to {o.abs().max():.1f}, weights s from {s.min():.3f} to {s.max():.3f}")
print(f"the largest difference of outputs, weights and gradients: {difference:.1e}")
assert difference < 1e-10

# %% [markdown]
# **It does not cost $N$ times as much.** One layer's fusion at MiniLM's size, forward and backward
# through $\Psi$, on 16 × 32 tokens; the fastest of four, because other work on the machine can only
# make it slower.

# %%
d, r, counts = 384, 24, [1, 2, 4, 8, 16, 32]
seconds = {"textbook": [], "low_rank": []}
h = torch.randn(16, 32, d)
for N in counts:
    adapters = [Adapter(AdapterConfig.pfeiffer(), d, r).requires_grad_(False) for _ in range(N)]
    names = [str(n) for n in range(N)]
    fusion = Fusion(",".join(names), names, d, dropout=0.1)
    for form, times in seconds.items():
        measured = []
        for _ in range(4):
            fusion.zero_grad()
            begin = time.perf_counter()
            getattr(fusion, form)(h, adapters).square().mean().backward()
            measured.append(time.perf_counter() - begin)
        times.append(min(measured))
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for (form, times), style in zip(seconds.items(), ("o--", "s-"), strict=True):
    axes.loglog(counts, [1000 * t for t in times], style, label=form)
axes.set_xticks(counts, counts)
axes.set(
    xlabel="N adapters", ylabel="milliseconds", title="fusion of one layer, forward and backward"
)
axes.minorticks_off()
axes.grid(alpha=0.3)
axes.legend()
plt.show()
ratio = seconds["textbook"][-1] / seconds["low_rank"][-1]
print(
    f"with {counts[-1]} adapters the low-rank form is {ratio:.1f} times as fast as the textbook's"
)

# %% [markdown]
# ## 4 Experiments
#
# ### 4.1 Experimental setup
#
# AdamW, a learning rate that falls linearly to 0, and early stopping on the development set. In the
# paper adapters start at $10^{-4}$ and stop after at most 30 epochs, fusion at $5 \cdot 10^{-5}$
# after at most 10.

# %%
show(train.lr_factor, train.make_optimizer)
tabulate(
    [[name, stage.help, f"{stage.lr:g}", stage.epochs] for name, stage in train.STAGES.items()],
    ["stage", "what it trains", "learning rate", "epochs at most"],
)

# %% [markdown]
# The paper regularises $V$ by an l2 norm, so that it adds no capacity of its own. Its distance from
# *what* is left open; the library takes the identity, from which $V$ starts:
#
# $$L_m + 0.01 \sum_l \lVert V_l - I \rVert_F^2$$

# %%
show(Fusion.regularization)
distance = fusion_regularization(bert).item()
print(f"of the fusion that `fit` has trained above, over all layers: {distance:.1e}")

# %% [markdown]
# *Also ours, because neither paper nor library says anything:* batch size 32, patience of 5
# epochs, the learning rates of `head` and `full`. The prediction head is AdapterHub's, and stage 2
# starts a new one.
#
# ### 4.2 Tasks and datasets
#
# Sixteen tasks, of which every example is *candidates and a label*. Classification has one candidate
# and a score for each of $K$ labels. *Multiple choice* (the commonsense tasks) has one candidate
# for each choice, one score for each, and a softmax over the choices. All are lines of one table,
# `TASKS` in `data.py`:

# %%
tabulate(
    [
        [name, task.type.__name__, " ".join(task.columns), len(task.labels), f"{task.sizes[0]:,}"]
        for name, task in TASKS.items()
    ],
    ["task", "type", "columns", "K", "training examples"],
)

# %% [markdown]
# An example of our own in the columns of Social IQA, on its way through encoder and head. Three
# candidates are three rows of one batch; the head gives each one number; `view` puts an example's
# numbers side by side, and from there on multiple choice is classification with $K = 3$.

# %%
row = {
    "context": "Ada trained an adapter and froze the encoder.",
    "question": "What will she do next?",
    "answerA": "forget the task",
    "answerB": "train another adapter",
    "answerC": "buy a lathe",
    "label": "2",
}
task = TASKS["social_i_qa"]
candidates, label = task.example(row)
encodings = tokenizer.encode_batch([list(pair) for pair in candidates])
for pair, encoding in zip(candidates, encodings, strict=True):
    print(f"{len(encoding.ids)} tokens: [CLS] {pair[0]} [SEP] {pair[1]} [SEP]")
head = Head({**task.type.head(task.labels), "layers": 2}, bert.config).eval()
activate(bert, None)
with torch.no_grad():
    h = torch.cat(
        [bert(torch.tensor([e.ids]), torch.tensor([e.type_ids]))[:, :1] for e in encodings]
    )
    logits = head(h, None)  # which reads [CLS] alone, and needs no mask
print(
    f"[CLS] of the candidates [B·C, 1, d] {tuple(h.shape)} -> logits [B, K] {tuple(logits.shape)}: {logits[0]}"
)
print(
    f"label {label} (from 0), loss of the untrained head {task.type.loss(logits, torch.tensor([label])):.3f}; "
    f"of three even choices ln 3 = {torch.tensor(3.0).log():.3f}"
)

# %% [markdown]
# ### Training, in full
#
# `fit` above has no schedule, no early stopping, no clipping, no checkpoints. This is the loop of
# `train.py`, for both stages and the baselines on one task: first what a stage adds to the encoder,
# then the training itself. Look for the lines of `fit` in it.

# %%
show(train.stage_1, train.stage_2, train.build)
show(train.train, folded=True)

# %% [markdown]
# **Now for real.** These are the runs of `make demo`: stage 1 on the two sources, then every system
# on the target with three seeds, in processes of their own. What a run prints is in the folder
# `logs`; each leaves a directory with its adapter or fusion, and its head, in AdapterHub's format.

# %%
study = demo.study_of(RUNS)
results, failed = quietly(grid.run, [*study.cells.values()], study.options)
assert not failed, failed
sources = {task: results[f"source-{task}"] for task in ("match", "order")}
rows = [
    [task, sizes[task], percent(of["majority_class_accuracy"]), percent(of["accuracy"])]
    for task, of in sources.items()
]
tabulate(rows, ["source", "training examples", "most frequent class", "its adapter"])

# %% [markdown]
# (Full fine-tuning on `match` in section 2.1 had fewer steps, so the two do not compare. In the
# paper's Table 1, both trained to the end, the means over 16 tasks are 75.51 for full fine-tuning
# and 76.05 for adapters.)
#
# How far can one of these skills get on the target? The two faults are independent. So a model that
# answers one question with accuracy $a$ and guesses the other finds the right one of four classes in
# about $a / 2$ of the cases; one that answers both, in about $a_1 a_2$. These are estimates: the
# skills were measured on other libraries than NumPy.

# %%
one, together = demo.ceiling({name: result["accuracy"] for name, result in results.items()})
print(f"with one skill about {one:.1f} %, with both about {together:.1f} %")
shown = {name: curves.read_log(RUNS / "runs" / f"{name}-240-0") for name in ("own", "fusion")}
curves.draw(shown, RUNS / "curves.png")
display(Image(RUNS / "curves.png", width=760))

# %% [markdown]
# The target's own adapter and the fusion, with the first seed. Solid: loss on the training data.
# Dashed: on the development set. The large marker is the epoch that is kept.
# (`python -m experiments.curves RUN ...` draws this for any runs.)
#
# ## 5 Results
#
# ### 5.1 and 5.2: does fusion help?
#
# The paper's hypothesis: if at least one task supports the target, fusion gains; if none does, the
# performance stays the same. An accuracy alone cannot tell why it is high, so controls stand beside
# the fusion, with the same 240 examples for each seed:
#
# - *the target's own adapter* (ST-A): what its examples give by themselves;
# - *a new head on* `match` or *on* `order`, frozen: what one skill gives, with nothing to compose.
#
# With a source that could solve the target by itself, a fusion would have to find it and no more.
# Here there is none: where `match` was trained, the order said nothing of the label, and where
# `order` was trained, the name did not. For the other question a head on one of them has only what
# the frozen encoder happens to show, and 240 examples.

# %%
table = composition.rows_of(study, results)
tabulate(*composition.table(study.systems, table))
print(demo.verdict(study, table))
print(f"seeds in which a system is above {one:.1f} %, the estimate for one skill:")
for system, of_seeds in composition.by_seed(table).items():
    print(f"  {sum(v > one for v in of_seeds.values())} of 3  {study.systems[system][0]}")
fused = results["fusion-240-0"]
print(
    f"one of the {fused['dev_examples']} development examples is {100 / fused['dev_examples']:.1f} points;",
    f"always the most frequent class: {percent(fused['majority_class_accuracy'])}",
)

# %% [markdown]
# Each system has its own learning rate, and the fusion trains far more parameters than the others.
# Three seeds, one target that was built to need both skills, an encoder much smaller than the
# paper's, and the best epoch chosen on the data that is reported, as in the paper. Now the paper's
# sixteen tasks. Left, what Table 1 of the paper says that fusion of single-task adapters adds to the
# target's own adapter (BERT-base, all training data). Right, the same difference as this project
# measured it with MiniLM where every target has only 200 examples, over three seeds
# ([results.md](results.md)); a bar without a value was not measured. The tasks are ordered by the
# size of their full training sets.

# %%
paper = {
    row["task"]: row
    for row in read_table("experiments/paper_results.csv")
    if row["encoder"] == "bert-base-uncased"
}
ours = {row["task"]: row for row in read_table("results/low_resource_table1.csv")}
names = [name for name in TASKS if name in paper]
gains = {
    "the paper: BERT-base, all data": [
        float(paper[n]["fusion_st_a"]) - float(paper[n]["st_a_16"]) for n in names
    ],
    "here: MiniLM, 200 examples": [
        float(ours[n]["fusion_st_a_mean"]) - float(ours[n]["st_a_16_mean"]) if n in ours else None
        for n in names
    ],
}
figure, panels = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
for axes, (title, values) in zip(panels, gains.items(), strict=True):
    colours = ["C0" if value and value > 0 else "C1" for value in values]
    bars = axes.barh(names, [value or 0 for value in values], color=colours)
    labels = ["" if v is None else f"{v:+.2f}" for v in values]  # None: not measured
    axes.bar_label(bars, labels, padding=2, fontsize=7)
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.margins(x=0.15)
    axes.set(xlabel="points gained by fusion over ST-A", title=title)
panels[0].invert_yaxis()
plt.show()
mean = sum(gains["the paper: BERT-base, all data"]) / len(names)
print(
    f"the paper's mean gain over {len(names)} tasks: {mean:.2f}; "
    f"RTE {gains['the paper: BERT-base, all data'][names.index('rte')]:.2f}, "
    f"MRPC {gains['the paper: BERT-base, all data'][names.index('mrpc')]:.2f}"
)

# %% [markdown]
# In the paper the gains sit at the bottom, where data are few: MRPC, RTE, CB. Right, where *all*
# targets have few data, and their sources up to 8,000 examples, they are wherever a source knows more
# than the target. (The text of the paper's section 5.2 speaks of 6.5 points for RTE and 5.64 for
# MRPC, which its Table 1, plotted here, does not give: [silent.md](silent.md#where-the-paper-disagrees-with-itself).)
#
# ## 6 What the fusion has learned
#
# The paper's Figure 4: the weights $s$, averaged over all tokens of the development set, for every
# layer; here of the fusion of the first seed. Beside it the same at `[CLS]` alone. In the last layer
# the head reads nothing but `[CLS]`, so there the mean over all tokens is mostly over tokens that
# nothing reads; this layer's $Q$ and $K$ were trained at `[CLS]` alone.

# %%
fusion_run = load_run(RUNS / "runs" / "fusion-240-0")
bert, names, split = fusion_run.bert, fusion_run.adapters, fusion_run.split()
found, weights = average(bert, inputs_of(bert, split), ("all", "cls")), {}
for title, tokens in (("all tokens", "all"), ("[CLS]", "cls")):
    weights[title] = torch.stack([s for _, s in sorted(found[tokens].items())])
layers = [f"layer {i + 1}" for i in range(len(bert.layers))]
figure, panels = plt.subplots(1, 2, figsize=(9, 2.2), sharey=True, layout="constrained")
for axes, (title, of_layers) in zip(panels, weights.items(), strict=True):
    image = heat_map(axes, of_layers.T, names, layers)
    axes.set(title=f"mean fusion weight, {title}")
figure.colorbar(image, ax=panels)
plt.show()

kinds, of_examples = [], []
for batch in batches(split, batch_size=64):
    with torch.no_grad():
        bert(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
    kinds.append(batch["labels"])
    of_examples.append(torch.stack([s[:, 0] for _, s in sorted(fusion_weights(bert).items())], 1))
kinds, at_cls = torch.cat(kinds), torch.cat(of_examples)  # [examples], [examples, layers, N]
rows = [[f"of the mean, {title}", *map(normalized_entropy, s)] for title, s in weights.items()]
each = torch.tensor([[normalized_entropy(s) for s in example] for example in at_cls])
tabulate([*rows, ["of each example's [CLS], mean", *each.mean(0).tolist()]], ["entropy", *layers])

# %% [markdown]
# The entropy is 0 if one adapter has all the weight, and 1 if all have the same. The paper finds that
# targets without a gain rely on their own adapter, that targets with few examples rely on related
# tasks with many, and that **the last layer is the most spread out**. Its possible reason: every
# other adapter sits between two frozen layers, so what it writes must be readable by the next layer,
# and the outputs of different adapters stay comparable. Nothing frozen follows the last one; it is in
# effect a part of the prediction head, each task's adapter may write there in a language of its own,
# and mixing them is harder.
#
# Here, of the last layer's numbers only those at `[CLS]` are about something that is read. And a mean
# is spread out, too, where every example has chosen, but not all the same: then the third row is
# lower than the second. In that row the last layer is the least spread out of all: where it is read,
# it decides most firmly. So it is with every seed ([results.md](results.md#the-demo)), and if the
# paper's mean is one over all tokens, and its head reads `[CLS]`, the paper's observation is mostly
# about tokens that nothing reads.
#
# Who listens to which skill? Left, the weight of `match` at the tokens of the sentences and at those
# of the names, as means over the development set; right, at every token of one example. The table
# has the means again, and `[CLS]` by the kind of the example. Above 0.5 it is `match` that has more
# weight, below it `order`. Where the last four rows differ, the fusion decides by the example; where
# the first two differ, by the token.

# %%
means, n = demo.draw(fusion_run, RUNS / "weights.png"), names.index("match")
display(Image(RUNS / "weights.png", width=900))
rows = [["sentences", *means["text_a"][:, n].tolist()], ["names", *means["text_b"][:, n].tolist()]]
for k, label in enumerate(fusion_run.task.labels):
    rows.append([f"[CLS]: {label}", *at_cls[kinds == k, :, n].mean(0).tolist()])
tabulate(rows, ["weight of `match`", *layers])

# %% [markdown]
# One pair in all four kinds; try another:

# %%
texts = "Return the cumulative sum of the elements.", "sum elements. the the Return of cumulative"
pairs = [(text, name) for text in texts for name in ("cumsum", "is leap year")]
answers = [(a["label"], percent(a["probability"])) for a in fusion_run.predict(pairs)]
rows = [[*pair, *answer] for pair, answer in zip(pairs, answers, strict=True)]
tabulate(rows, ["sentence", "name", "prediction", "its probability"])

# %% [markdown]
# ## 8.2 Fewer adapters
#
# The outlook reports that adapters with small weights can be removed after training with almost no
# loss. To remove an adapter is to leave it out of the softmax (`--mask`). Here neither can be spared:
# each of the two was trained for another question, so a removal should cost one answer. What is
# left of the fusion with one adapter, without any training? The last two columns take its answers
# apart into the two questions; guessing gives 50 % on each.


# %%
def without(*adapters):
    """Accuracy of the fusion on the four classes, on the name, and on the order."""
    words = [str(fusion_run.directory), *(["--mask", *adapters] if adapters else [])]
    classes = quietly(evaluate.main, words)["classes"]
    labels = [label.split(", ") for label in classes]  # such as ["right", "shuffled"]
    counts = torch.tensor([of["confusion"] for of in classes.values()])  # [label, prediction]
    same = [torch.tensor([[a[i] == b[i] for b in labels] for a in labels]) for i in range(2)]
    right = same[0] & same[1], *same
    return [percent((counts * which).sum().item() / counts.sum().item()) for which in right]


rows = [["both", *without()], ["`match`", *without("order")], ["`order`", *without("match")]]
tabulate(rows, ["adapters that are left", "accuracy", "the name right?", "the words in order?"])

# %% [markdown]
# `python -m experiments.prune` does the same by layer, and writes a smaller run.
#
# **Where to go from here.** Your own task, from Python and from the command line: the
# [README](../README.md) and [python.md](python.md). Your own idea: [forking.md](forking.md). What
# was measured, also where fusion does not help: [results.md](results.md).

# %%
minutes = (time.monotonic() - started) / 60, time.process_time() / 60
print("this page took {:.1f} minutes, {:.1f} of processor time".format(*minutes))
print(
    f"with {torch.get_num_threads()} threads; other work on the machine makes the first number larger"
)
