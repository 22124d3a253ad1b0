"""Google's checkpoints: TensorFlow's "tensor bundle" (tensorflow/core/util/tensor_bundle), read
with numpy.

The index file is a LevelDB table: name -> where the tensor is. The data files hold the raw numbers.
"""

import math
from collections import Counter
from functools import partial

import google_crc32c
import numpy as np
import torch

from formats.files import error_prefix, listed

TABLE_MAGIC = 0xDB4775248B80FB57
FLOAT_TYPES = {1: "<f4", 2: "<f8", 19: "<f2"}  # DT_FLOAT, DT_DOUBLE, DT_HALF -> numpy's

# the protocol-buffer messages of the index: (field number, wire type) -> name
HEADER = {(1, 0): "shards", (2, 0): "big_endian"}
ENTRY = {(1, 0): "dtype", (2, 2): "shape", (3, 0): "shard", (4, 0): "offset", (5, 0): "size"}
ENTRY |= {(6, 5): "crc"}
SHAPE, DIMENSION = {(2, 2): "dimensions"}, {(1, 0): "size"}


def read_tensorflow(path):
    """{name: function that reads the tensor} for the variables in a TensorFlow checkpoint, whose
    `.index` file is at `path`. Raises ValueError, here or when a tensor is read, for a damaged
    file: every block and tensor that is read is checked against its CRC-32C. Compressed, big-endian
    and partitioned variables, which Google's releases do not have, are refused."""
    with error_prefix(path):
        entries = table_entries(path.read_bytes())
        header = protobuf(entries.pop("", b""), HEADER)
        if header.get("big_endian"):
            raise ValueError("a big-endian checkpoint, which is not supported")
        entries = {name: protobuf(entry, ENTRY) for name, entry in entries.items()}
        used = Counter()
        for name, entry in entries.items():
            shard, shards = entry.get("shard", 0), header.get("shards", 1)
            data = path.with_name(f"{path.stem}.data-{shard:05d}-of-{shards:05d}")
            entry["data"] = data
            used[data] += entry.get("size", 0)
            if used[data] > data.stat().st_size:  # no two tensors share their bytes
                raise ValueError(f"{data.name} is cut off: {listed([name])} does not fit in it")
    return {name: partial(bundle_tensor, name, entry) for name, entry in entries.items()}


def bundle_tensor(name, entry):
    """One tensor of a bundle: a kernel is copied, transposed, anything else a view of its mapped
    data file."""
    if entry.get("dtype") not in FLOAT_TYPES:
        raise ValueError(f"{name} has TensorFlow type {entry.get('dtype')}, expected a float type")
    dtype = np.dtype(FLOAT_TYPES[entry["dtype"]])
    shape_message = entry.get("shape", [b""])[-1][:100]  # two dimensions need no more bytes
    dimensions = protobuf(shape_message, SHAPE).get("dimensions", [])
    shape = tuple(protobuf(dimension, DIMENSION).get("size", 0) for dimension in dimensions)
    data, offset, size = entry["data"], entry.get("offset", 0), entry.get("size", 0)
    fits = 0 < math.prod(shape) * dtype.itemsize == size <= data.stat().st_size - offset
    if len(shape) > 2 or not fits:
        raise ValueError(
            f"{name}: shape {list(shape)[:9]} in {dtype} is not {size} bytes at {offset} of "
            f"{data.name}"
        )
    # mode "c", copy on write: the tensor may be changed, the file never is
    array = np.memmap(data, dtype=dtype, mode="c", offset=offset, shape=shape)
    view = array.view()
    view.flags.writeable = False  # google_crc32c takes no buffer that could change
    if not intact(view, entry.get("crc", 0)):
        raise ValueError(f"{name} in {data.name} does not match its checksum: the file is damaged")
    tensor = torch.from_numpy(np.require(array, requirements="A"))
    if not name.endswith("/kernel"):
        return tensor
    # A view .T would do, but not add up in the same order. The memory is numpy's, which asks for
    # huge pages: that halves the time.
    return torch.from_numpy(np.empty(shape[::-1], np.float32)).copy_(tensor.T)


def table_entries(table):
    """{key: value} of a LevelDB table (leveldb/doc/table_format.md): blocks of entries, and a block
    of their places."""
    if len(table) < 48 or int.from_bytes(table[-8:], "little") != TABLE_MAGIC:
        raise ValueError("not the index of a TensorFlow checkpoint, or cut off")
    # the footer: offset and size of the metaindex block, which is not needed, and of the index
    _, _, offset, size, _ = varints(table, len(table) - 48, 4)
    entries, end = {}, 0
    for _, place in block_entries(table, offset, size):
        offset, size, _ = varints(place, 0, 2)
        if offset < end:  # in order, so that no block is read twice
            raise ValueError("damaged: its blocks overlap")
        end = offset + size + 5
        for key, value in block_entries(table, offset, size):
            entries[key.decode("latin-1")] = value
    return entries


def block_entries(table, offset, size):
    """(key, value) pairs of one block; a key shares its beginning with the one before."""
    block, trailer = table[offset : offset + size], table[offset + size : offset + size + 5]
    if len(block) < max(size, 4) or len(trailer) < 5:
        raise ValueError(f"cut off, or damaged: no block of {size} bytes at {offset}")
    if not intact(block + trailer[:1], int.from_bytes(trailer[1:], "little")):
        raise ValueError(f"the block at {offset} does not match its checksum: the file is damaged")
    if trailer[0] != 0:
        raise ValueError("its blocks are compressed, which is not supported")
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")  # the restart points are not needed
    position, key, names = 0, b"", 0
    while position < end:
        shared, unshared, length, position = varints(block, position, 3)
        key = key[:shared] + block[position : position + unshared]
        position += unshared + length
        names += len(key)  # bounded, since a few bytes can repeat a long name
        if position > end or names > 20 * size:
            raise ValueError(f"damaged: the block at {offset} does not hold what it says")
        yield key, block[position - length : position]


def protobuf(message, names):
    """{name: value} of a protocol-buffer message: numbers, the last one counts, and lists of byte
    strings. names: {(field number, wire type): name}; other fields are skipped."""
    result, position = {}, 0
    while position < len(message):
        tag, position = varints(message, position)
        name, wire_type = names.get((tag >> 3, tag & 7)), tag & 7
        length = {0: 0, 1: 8, 5: 4}.get(wire_type)
        if wire_type == 0:
            value, position = varints(message, position)
        elif wire_type == 2:
            length, position = varints(message, position)
        if length is None or position + length > len(message):
            raise ValueError("damaged: an entry ends in the middle of a field")
        field = message[position : position + length]
        position += length
        if name and wire_type == 2:
            result.setdefault(name, []).append(field)
        elif name:
            result[name] = value if wire_type == 0 else int.from_bytes(field, "little")
    return result


def varints(data, position, count=1):
    """`count` base-128 integers of at most 64 bits -> (*integers, next position)"""
    integers = []
    for _ in range(count):
        integer = 0
        for i, byte in enumerate(data[position : position + 10]):
            integer |= (byte & 0x7F) << 7 * i
            if byte < 0x80:
                break
        else:
            raise ValueError("damaged: a number without an end")
        integers.append(integer)
        position += i + 1
    return *integers, position


def intact(data, crc):
    """Whether data has this CRC-32C, which LevelDB stores rotated by 15 bits plus a constant.
    google_crc32c, Google's small library around the processor's own instruction, takes 0.04 s for
    BERT-base; numpy alone would take seconds."""
    crc = (crc - 0xA282EAD8) & 0xFFFFFFFF
    return google_crc32c.value(data) == ((crc >> 17) | (crc << 15)) & 0xFFFFFFFF
