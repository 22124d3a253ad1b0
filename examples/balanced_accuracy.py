"""A score to choose the best epoch by: balanced accuracy, the mean of the classes' recalls, for
which a rare class counts as much as a frequent one (Brodersen et al., 2010).

    python examples/balanced_accuracy.py --stage adapter --task cb --score balanced_accuracy
    python -m experiments.evaluate runs/cb --import examples.balanced_accuracy
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # found from any directory

import train
from data import Classification
from runtime.command import run_command


def balanced_accuracy(labels, predictions):
    """labels, predictions: [examples] -> 0 to 1. Classes without an example do not count."""
    right = (labels == predictions).double()
    recalls = [right[labels == label].mean() for label in labels.unique()]
    return sum(recalls).item() / len(recalls)


Classification.scores["balanced_accuracy"] = balanced_accuracy

if __name__ == "__main__":
    run_command("balanced_accuracy.py", train.main)
