"""The numbers of docs/papers/no-op-or-broadcast.md, prompt by prompt, against attention in plain torch."""

import numpy as np
import pytest
import torch
from asked import PROMPTS
from by_hand import Change, Network

import sinklens
from sinklens.sinks import Broadcast, EpsilonOverMean, NoOp, Record

NETWORK = Network("tiny-llada")


@pytest.fixture(scope="module")
def runs():
    """The prompts, decoded by hand."""
    return [NETWORK.decode(NETWORK.encode(prompt)) for prompt in PROMPTS]


def sinks_of(one):
    """Which keys of a pass receive more than 3 beyond the mean of the other keys, [layer, head, key]."""
    received = one.pattern.sum(dim=2)
    rest = torch.stack([received[..., [k for k in range(received.shape[-1]) if k != j]].mean(-1)
                        for j in range(received.shape[-1])], dim=-1)  # fmt: skip
    return received - rest > 3


def lengths(value):
    """Norms of values over the mean of their head."""
    norm = value.square().sum(-1).sqrt()
    return norm / norm.mean(-1, keepdim=True)


def written(value):
    """Norms of what each head would write of a value [layer, head, pos, d_head], over the mean of the head."""
    norms = []
    for layer, of_layer in enumerate(value):
        weight = NETWORK.model.tree.hf.model.layers[layer].self_attn.o_proj.weight.detach()
        matrices = weight.chunk(NETWORK.heads, dim=1)  # [d_model, d_head] each
        norms.append(torch.stack([(v @ w.T).square().sum(-1).sqrt() for v, w in zip(of_layer, matrices, strict=True)]))
    norm = torch.stack(norms)
    return norm / norm.mean(-1, keepdim=True)


def ranks(output):
    """Squared singular values over the largest, summed, from the eigenvalues of O Oᵀ."""
    squares = torch.linalg.eigvalsh(output @ output.transpose(-1, -2))
    return squares.sum(-1) / squares[..., -1]


def counted(one):
    """Sinks, no-ops and broadcasts of a pass, [3, layer]."""
    sink, ratio, rank = sinks_of(one), lengths(one.value), ranks(one.output)
    sent = (ratio >= 0.5) & (ratio <= 1.5) & (rank < 1.5)[..., None]
    return torch.stack([part.sum((1, 2)) for part in (sink, sink & (ratio < 0.2), sink & sent)])


def drained(step, run):
    """The factor of values if those of the sinks of layer 1 are nearly removed."""
    factor = torch.ones(NETWORK.layers, NETWORK.heads, len(run.tokens)).double()
    factor[1][sinks_of(run.passes[step])[1]] = 0.05
    return factor


def by_hand(run, planted):
    """`counted`, summed over the steps of a run."""
    changes = [Change(factor=drained(step, run) if planted else None) for step in range(len(run.canvases))]
    return sum(counted(NETWORK(*one)) for one in zip(run.canvases, changes, strict=True)).numpy()


def test_sinks_no_ops_and_broadcasts_are_those_of_the_weights(runs):
    """As trained, and with the values of the sinks of layer 1 multiplied by 0.05."""
    model, record = sinklens.load("tiny-llada"), Record(["values", "outputs"])
    base = sinklens.generate(model, PROMPTS, record_sinks=record)
    sinks = base.sinks.detect()

    def drain(value, hook):
        value[torch.from_numpy(sinks[:, hook.step, 1].values.swapaxes(1, 2))] *= 0.05
        return value

    hooks = [("blocks.1.attn.hook_v", drain)]
    planted = sinklens.generate(model, PROMPTS, replay=base, hooks=hooks, record_sinks=record)
    for track, is_planted in ((base.sinks, False), (planted.sinks, True)):
        found = [track.detect(kind).sum(["step", "head", "pos"]) for kind in (EpsilonOverMean(), NoOp(), Broadcast())]
        for row, run in enumerate(runs):
            expected = by_hand(run, is_planted)
            np.testing.assert_array_equal([part[row] for part in found], expected)
            assert expected[0].all()
            assert (expected[1, 1] == expected[0, 1] > 0) == is_planted


def measures(run):
    """The rows of the page's table but the last, over the passes of a run's steps 4, 12 and 20."""
    of_steps = []
    for one in (run.passes[step] for step in (4, 12, 20)):
        sink, ratio, rank = sinks_of(one), lengths(one.value), ranks(one.output)
        order = torch.randperm(len(run.tokens), generator=torch.Generator().manual_seed(0))
        mixed, has = ranks(one.pattern @ one.value[:, :, order]), sink.any(-1)
        share = written(one.value)
        _, drain, sent = counted(one).sum(-1) / sink.sum()
        cells = (
            100 * drain, 100 * sent, ratio[sink].mean(), ratio[has[..., None] & ~sink].mean(), rank[has].mean(),
            mixed[has].mean(), rank[~has].mean(), share[sink].mean(), share[has[..., None] & ~sink].mean(),
            100 * (share[sink] < 0.2).double().mean(),
        )  # fmt: skip
        of_steps.append([float(cell) for cell in cells])
    return np.mean(of_steps, axis=0)


def test_every_row_of_the_table_is_that_of_the_weights(script, runs):
    model, module = sinklens.load("tiny-llada"), script("no_op_or_broadcast")
    for run in runs:
        found = np.nanmean([module.of_pass(model, run.canvases[step][None]) for step in module.STEPS], axis=0)
        np.testing.assert_allclose(found, measures(run), rtol=2e-5)
