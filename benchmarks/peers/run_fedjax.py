"""FedJAX: federated_averaging with its jit backend, the networks written in plain JAX."""

from __future__ import annotations

import sys
from importlib.metadata import version

import jax

if not hasattr(jax, "tree_map"):  # FedJAX's last release calls it by its old name
    jax.tree_map = jax.tree_util.tree_map

import fedjax
import jax.numpy as jnp
from common import Task
from fedjax.algorithms import fed_avg

task = Task(sys.argv[1]).prepare()
name, drop = task.meta["model"], task.meta["dropout"]


def dense(x, w, b):
    return x @ w.T + b


def conv(x, w, b):
    return jax.lax.conv(x, w, (1, 1), "VALID") + b[:, None, None]


def pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def dropout(x, rate, key):
    return x * jax.random.bernoulli(key, 1 - rate, x.shape) / (1 - rate) if drop else x


def normed(x, w, scale, shift, stride=1):
    """Apply a convolution without bias that keeps the size, then GroupNorm of 32 groups."""
    around = w.shape[-1] // 2
    x = jax.lax.conv_general_dilated(x, w, (stride, stride), [(around, around)] * 2)
    groups = x.reshape(len(x), 32, -1)
    groups = (groups - groups.mean(-1, keepdims=True)) / jnp.sqrt(groups.var(-1, keepdims=True) + 1e-5)
    return groups.reshape(x.shape) * scale[:, None, None] + shift[:, None, None]


def resnet18(w, x):
    """Return the outputs of a ResNet-18 with a 3×3 stem."""
    layers = iter([w[i : i + 3] for i in range(0, len(w) - 2, 3)])
    x = jax.nn.relu(normed(x, *next(layers)))
    for stride in (1, 1, 2, 1, 2, 1, 2, 1):
        body = normed(jax.nn.relu(normed(x, *next(layers), stride)), *next(layers))
        x = jax.nn.relu(body + (normed(x, *next(layers), stride) if stride == 2 else x))
    return dense(x.mean((2, 3)), *w[-2:])


def outputs(w, x, key):
    """Return the network's outputs."""
    if name == "resnet18":
        return resnet18(w, x)
    if name == "cnn":
        x = pool(jax.nn.relu(conv(x, *w[0:2])))
        x = pool(jax.nn.relu(conv(x, *w[2:4])))
        w = w[4:]
    if name == "pfl":
        one, two = jax.random.split(key)
        x = pool(jax.nn.relu(conv(jax.nn.relu(conv(x, *w[0:2])), *w[2:4])))
        x = dropout(x, 0.25, one).reshape(len(x), -1)
        return dense(dropout(jax.nn.relu(dense(x, *w[4:6])), 0.5, two), *w[6:8])
    x = x.reshape(len(x), -1)
    for i in range(0, len(w) - 2, 2):
        x = jax.nn.relu(dense(x, *w[i : i + 2]))
    return dense(x, *w[-2:])


def loss(w, batch, key):
    """Return the mean cross-entropy."""
    logs = jax.nn.log_softmax(outputs(w, batch["x"], key))
    return -jnp.take_along_axis(logs, batch["y"][:, None], 1).mean()


algorithm = fed_avg.federated_averaging(
    jax.grad(loss),
    fedjax.optimizers.sgd(task.lr),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=task.batch, num_epochs=1, skip_shuffle=True),
)
state = algorithm.init([jnp.asarray(w) for w in task.weights()])
for t in range(task.rounds):
    clients = []
    for place in range(task.cohort.shape[1]):
        x, y = task.ordered(t, place)
        data = fedjax.ClientDataset({"x": x, "y": y.astype("int32")})
        clients.append((place, data, jax.random.PRNGKey(t * 1000 + place)))
    state, _ = algorithm.apply(state, clients)
    jax.block_until_ready(state.params)
    task.tick()
task.answer(state.params, version=f"{version('fedjax')} on jax {jax.__version__}")
