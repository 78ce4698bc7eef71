"""What FSDP2 offers and this package does not: each name is here, and says what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn


def refuse(what: str, instead: str) -> NoReturn:
    """Raise the NotImplementedError of everything in this module."""
    raise NotImplementedError(f"{what} is not available: {instead}")


class Unavailable:
    """Methods of ``torch.distributed.fsdp.FSDPModule`` that raise NotImplementedError.

    Those that say "Only ..." accept the value that describes what this package does.
    """

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        refuse(
            "set_custom_all_gather",
            "gathers are issued by torch_impl.comm.collectives, in place in the flat buffers",
        )

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        refuse(
            "set_custom_reduce_scatter",
            "reductions are issued by torch_impl.comm.collectives, from the flat gradient buffers",
        )

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> NoReturn:
        refuse(
            "set_all_reduce_hook",
            "use a mesh of two axes, whose outer one is reduced by the package, or change the gradients after backward",
        )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Only False."""
        if enable:
            refuse(
                "set_allocate_memory_from_process_group_for_comm(True)",
                "collectives work in the flat buffers, without staging buffers; leave the call out",
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        refuse(
            "set_symm_mem_for_comm",
            "collectives work in the flat buffers, without staging buffers; leave the call out",
        )

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Only True."""
        if not unshard_in_backward:
            refuse(
                "set_unshard_in_backward(False)",
                "a backward that needs the weights after all would read freed memory; set_reshard_after_forward(False) "
                "saves the second gather",
            )

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Only False."""
        if reduce_scatter_unused_params:
            refuse(
                "set_reduce_scatter_unused_params(True)",
                "a parameter without gradient counts as zero when any other of its unit has one, so ranks may use "
                "different parameters of a unit; units that only some ranks use must be merged into one",
            )

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Only 2, which is what there is."""
        if max_input_buffers != 2:
            refuse(
                f"set_reduce_scatter_max_input_buffers({max_input_buffers!r})",
                "gradient buffers of at most two units are alive; leave the call out",
            )

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Only False."""
        if enable:
            refuse(
                "set_separate_reduce_scatter_group(True)",
                "gathers and reductions share the process group of their mesh axis; leave the call out",
            )
