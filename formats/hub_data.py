"""Where the data sets of the paper's tasks are on the hub, and how they write columns and labels.

Repositories that today's `datasets` can load (no scripts). Labels are in a fixed order of ours: a
file's own feature names are never used; an integer is an index into them. sizes: rows of training
and development set; hub_sizes: where the hub's copy has others. held_out: training examples that
are the development set, where there is no other than the test set.
"""

GLUE, SUPER_GLUE = "nyu-mll/glue", "aps/super_glue"
NLI = ("entailment", "neutral", "contradiction")

HUB = {
    "mnli": {
        "source": GLUE,
        "config": "mnli",
        "columns": ("premise", "hypothesis"),
        "labels": NLI,
        "sizes": (392702, 9815),
        "dev": "validation_matched",
    },
    "qqp": {
        "source": GLUE,
        "config": "qqp",
        "columns": ("question1", "question2"),
        "labels": ("not_duplicate", "duplicate"),
        "sizes": (363846, 40430),
    },
    "sst2": {
        "source": GLUE,
        "config": "sst2",
        "columns": ("sentence",),
        "labels": ("negative", "positive"),
        "sizes": (67349, 872),
    },
    "winogrande": {
        "source": "allenai/winogrande",
        "config": "winogrande_xl",
        "columns": ("sentence", "option1", "option2"),
        "label": "answer",
        "labels": ("1", "2"),
        "sizes": (40398, 1267),
    },
    "imdb": {
        "source": "stanfordnlp/imdb",
        "config": "plain_text",
        "columns": ("text",),
        "labels": ("neg", "pos"),
        "sizes": (23000, 2000),
        "held_out": 2000,
    },
    "hellaswag": {
        "source": "Rowan/hellaswag",
        "config": None,
        "columns": ("ctx_a", "ctx_b", "endings"),
        "labels": ("0", "1", "2", "3"),
        "sizes": (39905, 10042),
    },
    "social_i_qa": {
        "source": "lighteval/siqa",
        "config": None,
        "columns": ("context", "question", "answerA", "answerB", "answerC"),
        "labels": ("1", "2", "3"),
        "sizes": (33410, 1954),
    },
    "cosmos_qa": {
        "source": "Samsoup/cosmos_qa",
        "config": None,
        "columns": ("context", "question", "answer0", "answer1", "answer2", "answer3"),
        "labels": ("0", "1", "2", "3"),
        "sizes": (25262, 2985),
    },
    "scitail": {
        "source": "allenai/scitail",
        "config": "snli_format",
        "columns": ("premise", "hypothesis"),
        "labels": ("entails", "neutral"),
        "sizes": (23596, 1304),
        "aliases": {
            "sentence1": "premise",
            "sentence2": "hypothesis",
            "gold_label": "label",
            "entailment": "entails",
        },
    },
    "argument": {
        "source": None,
        "config": None,
        "columns": ("topic", "sentence"),
        "label": "annotation",
        "labels": ("NoArgument", "Argument_against", "Argument_for"),
        "sizes": (18341, 2042),
    },
    "commonsense_qa": {
        "source": "tau/commonsense_qa",
        "config": None,
        "columns": ("question", "choices"),
        "label": "answerKey",
        "labels": ("A", "B", "C", "D", "E"),
        "sizes": (9741, 1221),
    },
    "boolq": {
        "source": SUPER_GLUE,
        "config": "boolq",
        "columns": ("passage", "question"),
        "labels": ("False", "True"),
        "sizes": (9427, 3270),
        "aliases": {"answer": "label"},
    },
    "mrpc": {
        "source": GLUE,
        "config": "mrpc",
        "columns": ("sentence1", "sentence2"),
        "labels": ("not_equivalent", "equivalent"),
        "sizes": (3668, 408),
    },
    "sick": {
        "source": "RobZamp/sick",
        "config": None,
        "columns": ("sentence_A", "sentence_B"),
        "labels": NLI,
        "sizes": (4500, 500),
        "hub_sizes": (4439, 495),
        "revision": "refs/convert/parquet",
    },
    "rte": {
        "source": GLUE,
        "config": "rte",
        "columns": ("sentence1", "sentence2"),
        "labels": ("entailment", "not_entailment"),
        "sizes": (2490, 277),
    },
    "cb": {
        "source": SUPER_GLUE,
        "config": "cb",
        "columns": ("premise", "hypothesis"),
        "labels": ("entailment", "contradiction", "neutral"),
        "sizes": (250, 56),
    },
}
