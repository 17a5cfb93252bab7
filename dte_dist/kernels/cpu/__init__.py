"""The kernels for tensors in CPU memory: numba loops without the GIL, split over threads.

This package is the backend: as a module it satisfies `interface.Kernels`, and `mypy` checks that it does. The
functions check arguments and turn tensors into addresses (`arguments.py`); the loops know only addresses.
"""

from __future__ import annotations

from dte_dist.kernels.cpu.index_codecs import (
    check_u16,
    count_again,
    decode_bitmap,
    decode_ef,
    decode_u16,
    encode_bitmap,
    encode_ef,
    encode_u16,
    join_again,
    split_again,
)
from dte_dist.kernels.cpu.index_map import (
    digest,
    gather_dense,
    gather_dense_flat,
    patch,
    scatter_dense,
    translate,
)
from dte_dist.kernels.cpu.scan import (
    advance,
    checksum,
    gather_1d,
    read,
    scatter,
    scatter_1d,
    searchsorted,
    strictly_increasing,
    write,
)
from dte_dist.kernels.cpu.value_codecs import (
    add,
    add_ulps,
    decode_planes,
    encode_planes,
    measure,
    narrow,
    scatter_add,
    subtract,
    ulp_deltas,
    widen,
)

__all__ = [
    "add",
    "add_ulps",
    "advance",
    "check_u16",
    "checksum",
    "count_again",
    "decode_bitmap",
    "decode_ef",
    "decode_planes",
    "decode_u16",
    "digest",
    "encode_bitmap",
    "encode_ef",
    "encode_planes",
    "encode_u16",
    "gather_1d",
    "gather_dense",
    "gather_dense_flat",
    "join_again",
    "measure",
    "narrow",
    "patch",
    "read",
    "scatter",
    "scatter_1d",
    "scatter_add",
    "scatter_dense",
    "searchsorted",
    "split_again",
    "strictly_increasing",
    "subtract",
    "translate",
    "ulp_deltas",
    "widen",
    "write",
]
