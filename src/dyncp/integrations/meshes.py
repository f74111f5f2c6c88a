"""The mesh of loader and executor in frameworks that make their own process groups."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def make_mesh(device_type: str, data_ranks: int, tensor_ranks: int, cp: int | None) -> DeviceMesh:
    """(dp, cp, tp), tensor-parallel ranks being neighbours. `cp` of the `data_ranks` run a plan
    together (None: all); they divide them, and the others are replicas."""
    cp = data_ranks if cp is None else cp
    if cp < 1 or data_ranks % cp:
        raise ValueError(f"cp is {cp}; it has to divide the {data_ranks} data-parallel ranks")
    sizes = (data_ranks // cp, cp, tensor_ranks)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "cp", "tp"))
