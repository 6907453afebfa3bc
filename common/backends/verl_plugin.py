"""verl 0.9.1's plugin: loaded in each of its processes by VERL_USE_EXTERNAL_MODULES=common.backends.verl_plugin.

Only verl imports this module. On every machine it keeps verl away from a class that trl 1.16 no longer has. With
VERL_ON_CPU=1 it also makes verl run without an accelerator, for `make cluster-check`: a platform named cpu, FSDP engines on
it, and a rollout server that samples with common.rollout. The server is meant for tiny models: one process, one thread.
"""

import asyncio
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
import verl.utils.distributed
import verl.utils.import_utils

from common.seeding import generator

# verl asks trl for AutoModelForCausalLMWithValueHead, which trl 1.16 dropped; without trl it takes the same path less that.
verl.utils.import_utils.is_trl_available = lambda: False

ROLLOUT = "sampler_cpu"  # actor_rollout_ref.rollout.name
IN_FLIGHT = 512  # most answers sampled together
GATHER_SECONDS = 0.05  # requests arrive one by one; waiting this long gathers a batch


def _cpu_device() -> types.ModuleType:
    """A stand-in for the module torch.cuda: memory counts are 0, generators are those of the CPU, the rest does nothing."""
    device: Any = types.ModuleType("torch_cpu_device")
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "current_device"):
        setattr(device, name, lambda *_a, **_k: 0)
    for name in ("empty_cache", "set_device", "synchronize", "reset_peak_memory_stats", "ipc_collect"):
        setattr(device, name, lambda *_a, **_k: None)
    device.manual_seed = device.manual_seed_all = torch.manual_seed
    device.get_rng_state, device.set_rng_state = torch.get_rng_state, torch.set_rng_state
    device.is_available, device.device_count = lambda: True, lambda: 1
    device.mem_get_info = lambda *_a, **_k: (1 << 30, 1 << 30)
    device.get_device_name = lambda *_a, **_k: "cpu"
    device.current_stream, device.stream, device.Stream = torch.cpu.current_stream, torch.cpu.stream, torch.cpu.Stream
    return device


def _make_platform() -> Any:
    from verl.plugin.platform.platform_base import PlatformBase

    class CpuPlatform(PlatformBase):
        """The processor as an accelerator. Ray calls it GPU, of which ray.init(num_gpus=1) invents one."""

        device_name, vendor_name, device_module = "cpu", "cpu", _cpu_device()

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return torch.device("cpu")

        def device_count(self) -> int:
            return 1

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        manual_seed_all = manual_seed

        def nothing(self, *_: Any, **__: Any) -> None:
            """What only an accelerator has to do."""

        set_device = synchronize = set_allocator_settings = empty_cache = nothing
        profiler_start = profiler_stop = cudart = nothing

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def ray_resource_name(self) -> str:
            return "GPU"

        def ray_noset_envvars(self) -> list[str]:
            return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

        def is_ipc_supported(self) -> bool:
            return False

    return CpuPlatform()


class SamplerServer:
    """A rollout server: answers verl's generate requests in batches, with the policy's newest weights."""

    def __init__(self, config: Any, model_path: str, rank: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.stop = AutoTokenizer.from_pretrained(model_path).eos_token_id
        self.config, self.rank = config, rank
        self.version: int | None = 0
        self.batches = 0
        self.waiting: list[tuple[list[int], dict[str, Any], asyncio.Future]] = []
        self.task: asyncio.Task | None = None

    async def ping(self) -> bool:
        """True once the model is loaded."""
        return True

    async def nothing(self, *_: Any, **__: Any) -> None:
        """A processor has no memory to hand over between sampling and training."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = resume_generation = nothing
    abort_all_requests = wait_for_requests_to_drain = start_profile = stop_profile = nothing

    async def load_weights(self, weights: dict[str, torch.Tensor], version: int | None) -> None:
        """Takes the policy's weights; ValueError unless they are exactly the model's (tied ones may be left out)."""
        result = self.model.load_state_dict(weights, strict=False)
        missing = set(result.missing_keys) - set(self.model._tied_weights_keys or ())
        if missing or result.unexpected_keys:
            raise ValueError(f"the policy's weights do not fit: {sorted(missing)} missing, {result.unexpected_keys} unknown")
        self.version = version

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        """One answer: verl's TokenOutput with ids, their log-probabilities and the version of the weights."""
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((list(prompt_ids), sampling_params, answer))
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._drain())
        return await answer

    async def _drain(self) -> None:
        await asyncio.sleep(GATHER_SECONDS)
        while self.waiting:
            batch, self.waiting = self.waiting[:IN_FLIGHT], self.waiting[IN_FLIGHT:]
            prompts, params = [ids for ids, _, _ in batch], batch[0][1]
            work = self._sample if params.get("prompt_logprobs") is None else self._judge
            try:
                done = await asyncio.to_thread(work, prompts, params)
            except Exception as error:  # each request gets the error, or verl would wait for ever
                for _, _, answer in batch:
                    answer.set_exception(error)
                continue
            for (_, _, answer), output in zip(batch, done, strict=True):
                answer.set_result(output)

    def _sample(self, prompts: list[list[int]], params: dict[str, Any]) -> list[Any]:
        from verl.workers.rollout.replica import TokenOutput

        from common.rollout import sample  # here alone, because every process of verl imports this module

        self.batches += 1
        completions = sample(
            self.model,
            prompts,
            max_new_tokens=int(params.get("max_tokens") or self.config.response_length),
            stop_ids=[self.stop],
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            generator=generator(int(self.config.seed), "verl", self.rank, self.batches),
        )
        return [
            TokenOutput(
                token_ids=completion.ids,
                log_probs=completion.logps,
                stop_reason="completed" if completion.finished else "length",
                extra_fields={"global_steps": self.version},
            )
            for completion in completions
        ]

    @torch.no_grad()
    def _judge(self, rows: list[list[int]], params: dict[str, Any]) -> list[Any]:
        """As a teacher: the log-probability of each row's own tokens. The entry of a token stands one place before it."""
        from verl.workers.rollout.replica import TokenOutput

        if params["prompt_logprobs"] != 0:
            raise ValueError(f"{ROLLOUT} judges the tokens written, not the {params['prompt_logprobs']} most likely ones")
        outputs = []
        for row in rows:
            ids_BT = torch.tensor([row])
            logp_TV = torch.log_softmax(self.model(input_ids=ids_BT).logits[0, :-1], -1)
            logp_T1 = logp_TV.gather(1, ids_BT[0, 1:, None])
            fields = {"prompt_ids": [*ids_BT[0, 1:, None].tolist(), [0]], "prompt_logprobs": [*logp_T1.tolist(), [0.0]]}
            outputs.append(TokenOutput(token_ids=[0], log_probs=[0.0], stop_reason="completed", extra_fields=fields))
        return outputs


def _server_name(rank: int, suffix: str = "") -> str:
    return f"{ROLLOUT}_{rank}{suffix}"


def _register_rollout() -> None:
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

    class SamplerReplica(RolloutReplica):
        """Starts the server of one replica as a Ray actor."""

        async def launch_servers(self) -> None:
            path = self.model_config.get("path", None) or self.model_config.get("local_path")
            options = {"name": _server_name(self.replica_rank, self.name_suffix), "num_cpus": 0, "max_concurrency": 1000}
            server = ray.remote(SamplerServer).options(**options).remote(self.config, path, self.replica_rank)
            await server.ping.remote()
            self.servers = [server]
            self._server_handle, self._server_address = server, f"{ROLLOUT}:{self.replica_rank}"

    class SamplerAdapter(base.BaseRollout):
        """The trainer's side: sends the policy's weights to the server after each step."""

        def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
            super().__init__(config, model_config, device_mesh)
            self.rank = replica_rank if replica_rank >= 0 else int(os.environ["RANK"])

        async def resume(self, tags: list[str]) -> None:
            pass

        async def release(self) -> None:
            pass

        async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
            sent = {name: tensor.detach().to("cpu", torch.float32).clone() for name, tensor in weights}
            await ray.get_actor(_server_name(self.rank)).load_weights.remote(sent, global_steps)

    globals()["SamplerAdapter"] = SamplerAdapter  # verl looks the class up by its module and name
    RolloutReplicaRegistry.register(ROLLOUT, lambda: SamplerReplica)
    base._ROLLOUT_REGISTRY[(ROLLOUT, "async")] = f"{__name__}.SamplerAdapter"


def _patch_engines() -> None:
    """verl's FSDP engines run on a processor as they are, but for three things that an accelerator alone has."""
    import verl.utils.fsdp_utils
    import verl.utils.model

    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # the name under which verl registers them
    offload = verl.utils.fsdp_utils.CPUOffloadPolicy
    verl.utils.fsdp_utils.CPUOffloadPolicy = lambda **_: offload(pin_memory=False)

    def load_value_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        """The critic without flash attention, which verl's own loader insists on."""
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, attn_implementation="eager"
        )

    verl.utils.model.load_valuehead_model = load_value_model


def _use_gloo() -> None:
    """One backend for one device; verl's "cpu:gloo,cpu:gloo" names the device twice."""
    start = verl.utils.distributed.initialize_global_process_group_ray
    verl.utils.distributed.initialize_global_process_group_ray = lambda timeout_second=None, backend=None: start(
        timeout_second, backend or "gloo"
    )


def _run_on_cpu() -> None:
    from verl.plugin.platform import platform_manager

    platform_manager._current_platform = _make_platform()  # verl has resolved another one before it loads plugins
    _patch_engines()
    _register_rollout()
    _use_gloo()


if os.environ.get("VERL_ON_CPU") == "1":
    _run_on_cpu()
