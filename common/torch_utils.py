"""What the PyTorch scripts share: MPI on parameters and gradients, and model.pt."""

import os

import torch

from common.mpi import broadcast, mpi_avg, num_procs, proc_id


def setup_pytorch_for_mpi(threads=1):
    """Use so many threads a rank: more than cores / ranks would only wait for each other."""
    torch.set_num_threads(threads)


def sync_params(module):
    """Overwrite the module's parameters on every rank by rank 0's."""
    for p in module.parameters():
        x = p.detach().numpy()
        broadcast(x)


def mpi_avg_grads(module):
    """Average the module's gradients over all ranks, in one Allreduce of one flat vector."""
    if num_procs() == 1:
        return
    grads = [p.grad for p in module.parameters()]
    flat = torch.as_tensor(mpi_avg(torch.cat([g.flatten() for g in grads]).numpy()))
    for g, part in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(part.view_as(g))


def save_model(folder, module):
    """Write the module's state_dict to model.pt, whole or not at all."""
    if proc_id() == 0:
        torch.save(module.state_dict(), folder / "model.pt.new")
        os.replace(folder / "model.pt.new", folder / "model.pt")
