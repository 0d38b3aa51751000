"""What the PyTorch scripts share: MPI on parameters and gradients, model.pt, and checkpoints."""

import io
from pickle import UnpicklingError

import torch
from torch import nn

from common.checkpoint import write_file
from common.mpi import broadcast, fail, mpi_avg, num_procs, proc_id, writing


def setup_pytorch_for_mpi(threads=1):
    """Use so many threads a rank: more than cores / ranks would only wait for each other."""
    torch.set_num_threads(threads)


def sync_params(module):
    """Overwrite the module's parameters on every rank by rank 0's."""
    for p in module.parameters():
        x = p.detach().numpy()
        broadcast(x)


def flat_params(module):
    """Move a module's parameters and gradients into one vector each; return it as a parameter.

    Adam, targets and averages over ranks then are one call, where a network has six tensors.
    """
    params = list(module.parameters())
    sizes = [p.numel() for p in params]
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in params]))
    flat.grad = torch.zeros_like(flat)
    for p, x, grad in zip(params, flat.detach().split(sizes), flat.grad.split(sizes)):
        p.data, p.grad = x.view_as(p), grad.view_as(p)
    return flat


def mpi_avg_grads(flat):
    """Average the gradient of a vector of parameters over all ranks, in one Allreduce."""
    if num_procs() > 1:
        flat.grad.copy_(torch.as_tensor(mpi_avg(flat.grad.numpy())))


def save_model(folder, module, itr=None):
    """Write the state_dict to model.pt, whole or not at all; with itr also to model_<itr>.pt."""
    if proc_id() == 0:
        with writing(folder):
            data = io.BytesIO()
            torch.save(module.state_dict(), data)
            write_file(folder / "model.pt", data.getbuffer())
            if itr is not None:
                write_file(folder / f"model_{itr}.pt", data.getbuffer())


def load_model(path):
    """Return what a model.pt holds, by name; a file of anything but tensors is refused."""
    try:
        state = torch.load(path, weights_only=True)  # which runs no code from the file
        return {name: x.numpy() for name, x in state.items()}
    except (OSError, EOFError, RuntimeError, ValueError, AttributeError, UnpicklingError) as error:
        what = f": {error.strerror}" if isinstance(error, OSError) else " as a file of tensors"
        fail(f"cannot read {path}{what}")


class State:
    """The tensors of modules and optimizers, as arrays by name, for checkpoints."""

    def __init__(self, *parts):
        self.parts = dict(enumerate(parts))

    def get_state(self):
        arrays = {}
        for name, part in self.parts.items():
            state = part.state_dict()
            if not isinstance(part, nn.Module):  # an optimizer's state: by parameter, then by name
                state = {f"{i}/{k}": x for i, s in state["state"].items() for k, x in s.items()}
            arrays |= {f"{name}/{key}": x.numpy() for key, x in state.items()}
        return arrays

    def set_state(self, arrays):
        for name, part in self.parts.items():
            keys = [key for key in arrays if key.startswith(f"{name}/")]
            state = {key.removeprefix(f"{name}/"): torch.as_tensor(arrays[key]) for key in keys}
            if not isinstance(part, nn.Module):
                moments = {}
                for key, x in state.items():
                    i, k = key.split("/")
                    moments.setdefault(int(i), {})[k] = x
                state = {**part.state_dict(), "state": moments}
            part.load_state_dict(state)  # in place: the NumPy policy shares the memory
