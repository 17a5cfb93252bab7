"""Every private name of torch's FSDP2 and FSDP1 that dte_dist needs, behind one function each.

As in `_torch_compat`, each function says what it returns, with which torch its private names were checked,
and what happens where they are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from dte_dist._torch_compat import HINT, missing, read
from dte_dist.errors import LayoutMismatch

__all__ = [
    "FLAT_PARAMETER",
    "FlatColumns",
    "flat_columns",
    "flat_gathered",
    "flat_local_shard",
    "fsdp1_handle",
    "fsdp1_mesh",
    "fsdp1_replica_group",
    "fsdp1_reshard",
    "fsdp1_shows_gathered",
    "fsdp1_write_back",
    "fsdp2_groups",
    "fsdp2_module_info",
    "is_cloned_by_fsdp1",
    "is_flattened_by_fsdp1",
]

FLAT_PARAMETER: Final = "_flat_param"
"""Key under which a module that FSDP1 wraps registers its FlatParameter, with use_orig_params=False. Checked
with torch 2.13. Were it another, no parameter of such a module would be found, which is refused."""


def fsdp2_groups(module: Any) -> list[Any]:
    """Return the parameter groups of an FSDP2 module: several since torch 2.12, at most one before.

    Checked with torch 2.13. Where both are gone: LayoutMismatch.
    """
    try:
        state = module._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):
            return list(state._fsdp_param_groups)
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    except AttributeError as error:
        missing(module, error)


def fsdp2_module_info(group: Any) -> Any:
    """Return where the first parameter of a group is registered: `module` and `param_name`.

    Checked with torch 2.13. Where it is gone: LayoutMismatch.
    """
    return read(read(group, "fsdp_params")[0], "_module_info")


# ---- FSDP1


class FlatColumns(NamedTuple):
    """What a FlatParameter knows of the parameters that it was made of, one entry for each.

    Attributes:
        infos: (key, module, name of the module) of the place where it is registered.
        shapes, strides: of the parameter.
        shards: what this rank holds of it: in_shard, offset_in_shard, numel_in_shard, intra_param_start_idx.
        extensions: spec of the DTensor that it is the local tensor of; None if it is plain.
        tied: (key, module, _, first key, first module, _) of each further place, of whichever parameter.
        originals: the parameters as they are registered, with use_orig_params=True; else none.
    """

    infos: Sequence[Any]
    shapes: Sequence[Any]
    strides: Sequence[Any]
    shards: Sequence[Any]
    extensions: Sequence[Any]
    tied: Sequence[Any]
    originals: Sequence[Tensor]


def flat_columns(flat: Tensor) -> FlatColumns:
    """Return what a FlatParameter knows of its parameters.

    Checked with torch 2.13. Where one is gone: LayoutMismatch.
    """
    names = "_param_infos", "_shapes", "_strides", "_shard_param_infos", "_param_extensions"
    columns = [read(flat, name) for name in (*names, "_shared_param_infos")]
    return FlatColumns._make([*columns, read(flat, "_params") or ()])


def flat_local_shard(flat: Tensor) -> Tensor | None:
    """Return the local shard of a FlatParameter, which torch makes in the first forward.

    Checked with torch 2.13. Where it is gone: None, as before the first forward.
    """
    return vars(flat).get("_local_shard")


def flat_gathered(flat: Tensor) -> list[Tensor]:
    """Return the tensors that still hold what was gathered for a pass, the one in full precision last.

    Checked with torch 2.13. Where one is gone: it is left out, as where nothing was gathered.
    """
    attributes = vars(flat)
    held = (attributes.get(name) for name in ("_full_param_padded", "_full_prec_full_param_padded"))
    return [tensor for tensor in held if tensor is not None and tensor.untyped_storage().size()]


def fsdp1_handle(wrapper: nn.Module) -> Any:
    """Return the handle of a module that FSDP1 wraps; None if it flattens no parameters of its own.

    Checked with torch 2.13. Where it is gone: None; its flattened parameters are then refused.
    """
    return vars(wrapper).get("_handle")  # getattr would go on to the wrapped module


def fsdp1_replica_group(wrapper: nn.Module) -> Any:
    """Return the process group of the ranks that hold the same range (HYBRID_SHARD); None if there is none.

    Checked with torch 2.13. Where it is gone: None.
    """
    return vars(wrapper).get("_inter_node_pg")


def fsdp1_mesh(wrapper: nn.Module) -> Any:
    """Return the DeviceMesh that a module was wrapped with, if it was one.

    Checked with torch 2.13. Where it is gone: None.
    """
    return vars(wrapper).get("_device_mesh")


def fsdp1_shows_gathered(handle: Any) -> bool:
    """Return whether a handle has left the gathered parameters registered after a pass.

    Checked with torch 2.13. Where it is gone: LayoutMismatch.
    """
    return bool(read(handle, "_skipped_use_sharded_views"))


def fsdp1_write_back(handle: Any) -> Callable[[], object] | None:
    """Return what writes replaced parameters back into the range; None where torch does not do that.

    Checked with torch 2.13. Where one is gone: LayoutMismatch.
    """
    if not read(handle, "_use_orig_params") or read(handle, "_skip_writeback_check"):
        return None
    write_back: Callable[[], object] = read(handle, "_writeback_orig_params")
    return write_back


def fsdp1_reshard(wrapper: nn.Module, handle: Any, *, free: bool) -> None:
    """Let a wrapped module have nothing but its range; `free` what was gathered.

    Checked with torch 2.13. Where it is gone: LayoutMismatch.
    """
    try:
        runtime = import_module("torch.distributed.fsdp._runtime_utils")
    except ImportError as error:
        raise LayoutMismatch(str(error), got=f"torch {torch.__version__}", hint=HINT) from error
    read(runtime, "_reshard")(wrapper, handle, free)


def is_flattened_by_fsdp1(tensor: Any) -> bool:
    """Return whether FSDP1 flattened a parameter, which leaves it no shape; or it is a FlatParameter.

    Checked with torch 2.13. Where it is gone: False.
    """
    return getattr(tensor, "_fsdp_flattened", False) is True


def is_cloned_by_fsdp1(tensor: Any) -> bool:
    """Return whether FSDP1 says of a tensor that it was cloned for a full state dict.

    Checked with torch 2.13. Where it is gone: False.
    """
    return getattr(tensor, "_has_been_cloned", False) is True
