"""Google's checkpoints: TensorFlow's "tensor bundle" (tensorflow/core/util/tensor_bundle). Its
index is a LevelDB table, name -> where the tensor is; the data files hold the raw numbers."""

import math

import torch

from formats.files import error_prefix

TABLE_MAGIC = 0xDB4775248B80FB57
FLOAT_TYPES = {1: torch.float32, 2: torch.float64, 14: torch.bfloat16, 19: torch.float16}


def read_tensorflow(path):
    """{name: tensor of floats} of a checkpoint by its `.index` file; checksums are not looked at"""
    with error_prefix(path, is_read=True):
        entries = table_entries(path.read_bytes())
        shards = protobuf(entries.pop("", b"")).get(1, 1)  # a BundleHeaderProto
        entries = {name: protobuf(entry) for name, entry in entries.items()}  # BundleEntryProtos
        entries = {name: entry for name, entry in entries.items() if entry.get(1) in FLOAT_TYPES}
        return {name: bundle_tensor(name, entry, path, shards) for name, entry in entries.items()}


def bundle_tensor(name, entry, index, shards):
    """One tensor, from its data file; a kernel is transposed."""
    kind, shard, offset, size = (entry.get(field, 0) for field in (1, 3, 4, 5))
    dimensions = protobuf(entry.get(2, [b""])[0]).get(2, [])
    shape = tuple(protobuf(dimension).get(1, 0) for dimension in dimensions)
    data = index.with_name(f"{index.stem}.data-{shard:05d}-of-{shards:05d}")
    with open(data, "rb") as file:
        file.seek(offset)
        content = file.read(size)
    if not 0 < math.prod(shape) * FLOAT_TYPES[kind].itemsize == size == len(content):
        raise ValueError(f"{name} in {data.name}, {list(shape)}, is cut off, or damaged")
    tensor = torch.frombuffer(bytearray(content), dtype=FLOAT_TYPES[kind]).reshape(shape)
    return tensor.T.contiguous() if name.endswith("/kernel") else tensor


def table_entries(table):
    """{key: value} of a LevelDB table (leveldb/doc/table_format.md)"""
    if len(table) < 48 or int.from_bytes(table[-8:], "little") != TABLE_MAGIC:
        raise ValueError("not the index of a TensorFlow checkpoint, or cut off")
    # the footer: offset and size of the metaindex block, which is not needed, and of the index
    _, _, offset, size, _ = varints(table, len(table) - 48, 4)
    entries = {}
    for _, place in block_entries(table, offset, size):
        offset, size, _ = varints(place, 0, 2)
        for key, value in block_entries(table, offset, size):
            entries[key.decode("latin-1")] = value
    return entries


def block_entries(table, offset, size):
    """(key, value) pairs of one block; a key shares its beginning with the one before."""
    block = table[offset : offset + size]
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")  # the restart points are not needed
    position, key = 0, b""
    while position < end:
        shared, unshared, length, position = varints(block, position, 3)
        key = key[:shared] + block[position : position + unshared]
        position += unshared + length
        yield key, block[position - length : position]


def protobuf(message):
    """{field: its last number, or all of its byte strings} of a protocol-buffer message"""
    result, position = {}, 0
    while position < len(message):
        tag, position = varints(message, position)
        field, fixed = tag >> 3, {1: 8, 5: 4}.get(tag & 7)
        if tag & 7 == 0:
            result[field], position = varints(message, position)
            continue
        length, position = (fixed, position) if fixed else varints(message, position)
        result.setdefault(field, []).append(message[position : position + length])
        position += length
    return result


def varints(data, position, count=1):
    """`count` base-128 integers -> (*integers, next position)"""
    integers = []
    for _ in range(count):
        end = position
        while data[end] >= 0x80:
            end += 1
        content, position = data[position : end + 1], end + 1
        integers.append(sum((byte & 0x7F) << 7 * i for i, byte in enumerate(content)))
    return *integers, position
