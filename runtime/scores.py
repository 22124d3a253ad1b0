"""Scores: of labels and predictions, LongTensors [examples] of class indices. As in scikit-learn, a
class that occurs in neither does not count, and a quotient of nothing is 0."""

import torch


def accuracy(labels, predictions):
    """The share of examples that are right, 0 to 1."""
    return (labels == predictions).sum().item() / len(labels)


def f1_of_class(labels, predictions, k):
    """2 · precision · recall / (precision + recall) of class k: 2 TP / (2 TP + FP + FN)"""
    right = ((labels == k) & (predictions == k)).sum().item()
    both = (labels == k).sum().item() + (predictions == k).sum().item()
    return 2 * right / both if both else 0.0


def macro_f1(labels, predictions):
    """The mean of the classes' F1, each class alike."""
    classes = torch.cat([labels, predictions]).unique().tolist()
    return sum(f1_of_class(labels, predictions, k) for k in classes) / len(classes)


def f1(labels, predictions):
    """F1 of the positive class of two, which is the second: GLUE's for MRPC and QQP."""
    return f1_of_class(labels, predictions, 1)


# of K classes; F1 of the positive class is for K = 2 alone (Task.scores)
CLASS_SCORES = {"accuracy": accuracy, "macro_f1": macro_f1, "f1": f1}
