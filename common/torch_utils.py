"""What the PyTorch scripts share: MPI on parameters and gradients, model.pt, and checkpoints."""

import io
from pickle import UnpicklingError

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from common.errors import SidespinError
from common.mpi import broadcast, mpi_avg, num_procs, proc_id
from common.run import KEPT_MODELS, MODELS, write_file
from common.weights import orthogonal_layers


def sync_params(module):
    """Overwrite the module's parameters and buffers on every rank with rank 0's."""
    for x in module.state_dict().values():
        broadcast(x.numpy())


@torch.no_grad()
def init_orthogonal(net, last_gain, rng):
    """Overwrite the weights of linear layers with orthogonal ones, and their biases with 0."""
    layers = [x for x in net.modules() if isinstance(x, nn.Linear)]
    weights = orthogonal_layers([x.weight.shape for x in layers], last_gain, rng)
    for layer, value in zip(layers, weights):
        layer.weight.copy_(torch.as_tensor(value))
        if layer.bias is not None:
            layer.bias.zero_()


class Adam(torch.optim.Adam):
    """torch.optim.Adam(..., fused=True) with half the overhead per step; otherwise the same."""

    def __init__(self, params, lr=1e-3, **kwargs):
        super().__init__(params, lr, fused=True, **kwargs)

    @torch.no_grad()
    def step(self, closure=None):
        groups = [[p for p in g["params"] if p.grad is not None] for g in self.param_groups]
        rare = closure or self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        rare = rare or any(p not in self.state for params in groups for p in params)
        kinds = ("amsgrad", "decoupled_weight_decay")
        if rare or any(group.get(kind) for group in self.param_groups for kind in kinds):
            step = torch.optim.Adam.step  # it also creates the state of new parameters
            step = step if hasattr(step, "hooked") else self.profile_hook_step(step)
            return step(self, closure)
        for group, params in zip(self.param_groups, groups):
            if not params:
                continue
            states = [self.state[p] for p in params]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adam_(
                params,
                [p.grad for p in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=group["maximize"],
            )
        return None

    step.hooked = True  # so that torch does not wrap it in its profiler


def mpi_avg_grads(optimizer):
    """Average the gradients of an optimizer's parameters over all ranks, in one Allreduce."""
    if num_procs() == 1:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    mine = torch.tensor([float(p.grad is not None) for p in params])  # another rank may have one
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([mine, *(grad.flatten() for grad in grads)])
    flat = torch.as_tensor(mpi_avg(flat.numpy()))
    any_rank, *grads = flat.split([len(params), *(p.numel() for p in params)])
    for p, has_grad, grad in zip(params, any_rank.tolist(), grads):
        p.grad = grad.view_as(p) if has_grad else None


class Normalizer(nn.Module):
    """The running mean and standard deviation of numbers, over all ranks; at first 0 and 1."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("std", torch.ones(shape))
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x):
        return (x - self.mean) / self.std

    def update(self, x):
        """Count one more batch [B, ...], of the same size on all ranks and in every epoch."""
        x = x.double()
        mean = torch.as_tensor(mpi_avg(x.mean(0).numpy()), dtype=torch.float64)
        var = torch.as_tensor(mpi_avg(((x - mean) ** 2).mean(0).numpy()), dtype=torch.float64)
        self.batches += 1
        share = 1 / self.batches.double()
        moved = mean - self.mean
        before = (self.std != 1) * self.std.double() ** 2
        self.mean += share * moved
        std = ((1 - share) * (before + share * moved**2) + share * var).sqrt().float()
        # A number that has never changed keeps its std of 1: anything small would make its first
        # change huge. To tell them apart, any other std of exactly 1 becomes the next float.
        std = torch.where(std == 1, 1 + 2**-23, std)
        self.std.copy_(torch.where(std <= 1e-6 * self.mean.abs() + 1e-8, 1.0, std))


def save_model(run, module, epoch):
    """Write the state_dict to model.pt, atomically; with --keep-models, keep one per save."""
    if proc_id() == 0:
        data = io.BytesIO()
        torch.save(module.state_dict(), data)
        names = [MODELS["torch"]]
        if run.args.keep_models:
            names.append(KEPT_MODELS["torch"].format(epoch))
        with run.writing():
            for name in names:
                write_file(run.folder / name, data.getbuffer())


def load_model(path):
    """Return a model.pt's arrays by name; refuse a file that holds anything but tensors."""
    try:
        state = torch.load(path, weights_only=True)  # this runs no code from the file
        return {name: x.numpy() for name, x in state.items()}
    except (OSError, EOFError, RuntimeError, ValueError, AttributeError, UnpicklingError) as error:
        what = f": {error.strerror}" if isinstance(error, OSError) else " as a file of tensors"
        raise SidespinError(f"cannot read {path}{what}") from error


class State:
    """Anything with a state_dict (modules, optimizers, schedulers), for a checkpoint."""

    def __init__(self, *parts):
        self.parts = parts
        # A schedule wraps its optimizer's step(). Without it, a resumed run would begin it again.
        wrapped = any(hasattr(getattr(x, "step", 0), "_wrapped_by_lr_sched") for x in parts)
        if wrapped and not any(isinstance(x, LRScheduler) for x in parts):
            lost = "--resume would lose the learning rate schedule of an optimizer"
            raise SidespinError(f"{lost}: add it to State(...)")

    def get_state(self):
        return [_to_numpy(part.state_dict()) for part in self.parts]

    def set_state(self, states):
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(_to_torch(state))  # updates modules in place


def _to_numpy(x):
    """Turn a state_dict into dictionaries, lists and arrays; integer keys become #key."""
    if isinstance(x, dict):
        return {f"#{k}" if isinstance(k, int) else k: _to_numpy(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_to_numpy(v) for v in x]
    return x.numpy() if isinstance(x, torch.Tensor) else x


def _to_torch(x):
    if isinstance(x, dict):
        return {int(k[1:]) if k[0] == "#" else k: _to_torch(v) for k, v in x.items()}
    if isinstance(x, list):
        return [_to_torch(v) for v in x]
    return torch.as_tensor(x) if isinstance(x, np.ndarray | np.generic) else x


class Tanh(nn.Module):
    """nn.Tanh, to within 2e-7; five times faster on AMD, where PyTorch's own is slow."""

    def forward(self, x):
        return _Tanh.apply(x) if AMD else torch.tanh(x)


class _Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.sigmoid(2 * x).mul_(2).sub_(1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(grad, y)  # grad * (1 - y^2), and differentiable itself


class Linear(nn.Linear):
    """nn.Linear with faster matrix products where PyTorch's own are slow.

    PyTorch computes products with MKL, which leaves AVX-512 unused on AMD. From Zen 5 on, oneDNN is
    twice as fast; on older CPUs there is nothing to gain. A small product is not worth the detour.
    Only forward-mode differentiation is missing.
    """

    def forward(self, x):
        fast = ONEDNN and x.shape[1:] == (self.in_features,) and x.device.type == "cpu"
        fast = fast and x.dtype == self.weight.dtype == torch.float32
        fast = fast and x.numel() * self.out_features >= 2_000_000
        # Neither under autocast nor under torch.func, which this autograd.Function does not support
        fast = fast and not torch.is_autocast_enabled("cpu")
        if not fast or torch._C._are_functorch_transforms_active():
            return super().forward(x)
        linear = _Linear.apply if torch.is_grad_enabled() else _times_transposed
        return linear(x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return _times_transposed(x, w, b)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph=True, gradients need gradients themselves
            return grad @ w, grad.t() @ x, grad.sum(0) if ctx.needs_input_grad[2] else None
        (x_node, _), (w_node, _), *_ = ctx.next_functions
        return (
            _times_transposed(grad, w.t()) if _runs(x_node) else None,
            # Not in loss_pi.backward(inputs=...), for the weights of Q
            _times_transposed(grad.t(), x.t()) if _runs(w_node) else None,
            grad.sum(0) if ctx.needs_input_grad[2] else None,
        )


def _times_transposed(x, w, b=None):
    """Return x @ w.t() + b, computed by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")


def _runs(node):
    """Tell whether this backward pass goes on to a node of the graph."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad() does not tell
        return True


_CPU = torch.cpu.get_capabilities()
AMD = _CPU.get("cpu_name", "").startswith("AMD")
ZEN_5 = AMD and _CPU.get("avx512_f", False) and _CPU.get("avx_vnni", False)  # or later
ONEDNN = torch.backends.mkldnn.is_available() and ZEN_5
