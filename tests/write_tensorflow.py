"""Writes a BERT encoder as Google published them, with TensorFlow itself (a Python that has
tensorflow-cpu and numpy):

    python tests/write_tensorflow.py ENCODER OUT [SHARDS]

ENCODER holds config.json, vocab.txt, model.safetensors; OUT gets bert_config.json, vocab.txt,
bert_model.ckpt.*, with a pooler, pretraining heads, Adam's moments and global_step beside the
encoder's variables. The two in tests/golden/bert, whose bert_config.json has no more keys than
Google's, are of tests/golden/bert/encoder with 1 and 3 shards, by tensorflow-cpu 2.21.0.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf


def read_safetensors(path):
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            numbers = np.frombuffer(data[start + begin : start + end], "<f4")
            yield name, numbers.reshape(entry["shape"])


def google_name(name):
    """bert.encoder.layer.0.output.dense.weight -> bert/encoder/layer_0/output/dense/kernel"""
    name = re.sub(r"layer\.(\d+)", r"layer_\1", name).replace("_embeddings.weight", "_embeddings")
    name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    name = name.replace("LayerNorm.bias", "LayerNorm.beta")
    return re.sub(r"\.weight$", ".kernel", name).replace(".", "/")


def main(encoder, out, shards=1):
    variables = {}
    for name, array in read_safetensors(encoder / "model.safetensors"):
        name = google_name(name)
        variables[name] = array.T if name.endswith("/kernel") else array
    d = variables["bert/embeddings/LayerNorm/beta"].shape[0]
    for name in ("bert/embeddings/LayerNorm/beta", "bert/encoder/layer_0/intermediate/dense/bias"):
        variables[f"{name}/adam_m"] = variables[f"{name}/adam_v"] = variables[name]
    for name in ("bert/pooler/dense/kernel", "cls/predictions/transform/dense/kernel"):
        variables[name] = np.eye(d, dtype="f")
    for name in ("bert/pooler/dense/bias", "cls/predictions/output_bias"):
        variables[name] = np.ones(d, "f")
    variables["cls/seq_relationship/output_weights"] = np.ones((2, d), "f")
    variables["global_step"] = np.int64(1000)

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    shutil.copy(encoder / "vocab.txt", out)
    shutil.copy(encoder / "config.json", out / "bert_config.json")

    names, parts = sorted(variables), []
    for shard in range(shards):  # a bundle of its own for each, then one index over all of them
        part, parts = str(out / f"part{shard}"), [*parts, str(out / f"part{shard}")]
        own = names[shard::shards]
        tensors, slices = [variables[name] for name in own], [""] * len(own)
        tf.raw_ops.SaveV2(prefix=part, tensor_names=own, shape_and_slices=slices, tensors=tensors)
    prefix = str(out / "bert_model.ckpt")
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=prefix)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
