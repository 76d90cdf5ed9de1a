"""Private names of other libraries: each behaves as sinklens expects."""

import asyncio

import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from building import random_hf
from contracts import relied_on
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations import moe


def test_the_flash_attention_of_the_cpu_returns_the_log_sum_exp():
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    with relied_on("torch", "aten._scaled_dot_product_flash_attention_for_cpu (output, log-sum-exp)"):
        mixed, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=None, scale=0.5
        )
        scores = query @ key.transpose(-2, -1) * 0.5
        torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mixed, scores.softmax(-1) @ value, atol=1e-5, rtol=1e-5)


def test_a_tensor_counts_in_place_writes():
    value = torch.zeros(3)
    with relied_on("torch", "Tensor._version, a count of writes"):
        before = value._version
        value[:1] = 1
        assert value._version == before + 1


def test_a_compiled_module_is_recognized_by_its_attributes():
    with relied_on("torch", "Module._compiled_call_impl and OptimizedModule._orig_mod"):
        module = nn.Linear(2, 2)
        assert module.__dict__.get("_compiled_call_impl") is None
        module.compile(backend="eager")
        assert module.__dict__["_compiled_call_impl"] is not None
        assert "_orig_mod" in torch.compile(nn.Linear(2, 2), backend="eager")._modules


def test_a_module_keeps_its_children_and_hooks_in_dictionaries():
    module = nn.Sequential(nn.Identity())
    with relied_on("torch", "Module._modules and the four dictionaries of hooks"):
        assert list(module._modules) == ["0"]
        for register, kept in (
            (module.register_forward_hook, "_forward_hooks"),
            (module.register_forward_pre_hook, "_forward_pre_hooks"),
            (module.register_full_backward_hook, "_backward_hooks"),
            (module.register_full_backward_pre_hook, "_backward_pre_hooks"),
        ):
            handle = register(lambda *_: None)
            assert len(getattr(module, kept)) == 1
            handle.remove()
            assert not getattr(module, kept)


def test_accelerate_keeps_the_forward_it_wraps():
    module = nn.Identity()
    add_hook_to_module(module, ModelHook())
    with relied_on("accelerate", "_old_forward, the bound method that the wrapper calls"):
        assert module.__dict__["_old_forward"].__func__ is nn.Identity.forward
        module.__dict__["_old_forward"] = lambda x: x + 1
        assert module(1) == 2
    remove_hook_from_module(module)


def test_accelerate_keeps_its_hook_on_the_module():
    module = nn.Linear(2, 2)
    add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    with relied_on("accelerate", "_hf_hook, which names the device where a module computes"):
        assert module.__dict__["_hf_hook"].execution_device == "cpu"
    remove_hook_from_module(module)


def test_uvicorn_says_whether_a_request_of_a_connection_is_under_way():
    from uvicorn import Config
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import ServerState

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    class Silent(asyncio.Transport):
        def write(self, data):
            """Send nothing."""

        def is_closing(self):
            return False

        def resume_reading(self):
            """Nothing was paused."""

    async def served():
        state, transport = ServerState(), Silent()
        connection = H11Protocol(Config(app, lifespan="off"), state, {})
        connection.connection_made(transport)
        assert (connection.cycle, connection.connections) == (None, {connection})
        assert connection.connections is state.connections
        connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.cycle.response_complete is False
        await asyncio.gather(*state.tasks)
        assert connection.cycle.response_complete is True
        connection.timeout_keep_alive_task.cancel()

    with relied_on("uvicorn", "H11Protocol.cycle, its response_complete, and H11Protocol.connections"):
        asyncio.run(served())


def test_the_fused_operators_of_a_gpu_return_a_log_sum_exp():
    query = torch.randn(1, 1, 2, 8)
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ):
        with relied_on("torch", f"aten.{name} (..., logsumexp, ...), and torch._fused_sdp_choice, which chooses one"):
            schema = getattr(torch.ops.aten, name).default._schema
            assert schema.returns[1].name in ("logsumexp", "log_sumexp")
            assert isinstance(torch._fused_sdp_choice(query, query, query), int)


def test_transformers_lists_tied_weights_and_says_which_attention_runs():
    hf = random_hf()
    with relied_on("transformers", "PreTrainedModel._tied_weights_keys and config._attn_implementation"):
        assert "lm_head.weight" in hf._tied_weights_keys
        hf.set_attn_implementation("sdpa")
        assert hf.config._attn_implementation == "sdpa"


def test_transformers_has_its_own_grouped_products_with_a_fake_result(monkeypatch):
    tokens, experts = torch.randn(5, 8), torch.randn(2, 8, 16)
    ends = torch.tensor([2, 5], dtype=torch.int32)
    with relied_on("transformers", "moe._can_use_grouped_mm, which chooses between torch's and its own operation"):
        monkeypatch.setattr(moe, moe._can_use_grouped_mm.__name__, lambda *_, **__: False)
        found = moe._grouped_mm(tokens, experts, offs=ends)
        torch.testing.assert_close(found, torch.cat([tokens[:2] @ experts[0], tokens[2:] @ experts[1]]))
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(value) for value in (tokens, experts, ends)]
            assert moe._grouped_mm(*fake[:2], offs=fake[2]).shape == found.shape
