"""What the router adds: the same two legs by the client itself and through the router.

The servers are real processes with the scripted engine, which answers at once;
prompts are token ids, so that nobody tokenises. Both ways are measured in turn,
one request at a time, so that a noisy moment hits both alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import grpc

from baton.demo_model import demo_model_folder
from baton.launch.cluster import Cluster
from baton.launch.config import ClusterConfig, RouterSection
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from protos.tokens import pack_token_ids

PROMPT = pack_token_ids(range(100, 132))
SAMPLING = pb.SamplingParams(max_tokens=2, ignore_eos=True)


def run(is_quick: bool) -> dict[str, float]:
    repetitions = 60 if is_quick else 400
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(_config(Path(folder)), progress=lambda _: None) as cluster,
    ):
        cluster.start()
        address_of = {child.role: child.address for child in cluster.children}
        through, direct = _spans_ms(address_of, repetitions)
    return {
        "router_direct_p50_ms": statistics.median(direct),
        "router_p50_ms": statistics.median(through),
        "router_added_p50_ms": statistics.median(through) - statistics.median(direct),
    }


def _config(folder: Path) -> ClusterConfig:
    return ClusterConfig(
        model=str(demo_model_folder()),
        runtime_dir=str(folder),
        router=RouterSection(listen="127.0.0.1:0"),
        engine={
            "engine": "scripted",
            "kv_cache": {"num_blocks": 4096},
            # Scripted leases end by expiry alone.
            "transfer": {"lease_ms": 200},
        },
    )


def _spans_ms(address_of: dict[str, str], repetitions: int) -> tuple[list[float], list[float]]:
    stubs = {
        role: InferenceStub(grpc.insecure_channel(address))  # type: ignore[no-untyped-call]
        for role, address in address_of.items()
    }
    through: list[float] = []
    direct: list[float] = []
    for _ in range(repetitions):
        for spans, ask in ((through, _through_router), (direct, _both_legs)):
            start = time.perf_counter()
            ask(stubs)
            spans.append((time.perf_counter() - start) * 1e3)
    warm_up = repetitions // 10
    return through[warm_up:], direct[warm_up:]


def _through_router(stubs: dict[str, InferenceStub]) -> None:
    request = pb.GenerateRequest(token_ids=PROMPT, sampling=SAMPLING)
    list(stubs["router"].Generate(request))


def _both_legs(stubs: dict[str, InferenceStub]) -> None:
    context = pb.GenerateRequest(
        token_ids=PROMPT, sampling=SAMPLING, request_type=pb.REQUEST_TYPE_CONTEXT_ONLY
    )
    *_, last = stubs["context"].Generate(context)
    generation = pb.GenerateRequest(
        token_ids=PROMPT,
        sampling=SAMPLING,
        request_type=pb.REQUEST_TYPE_GENERATION_ONLY,
        context_phase_params=last.context_phase_params,
    )
    list(stubs["generation"].Generate(generation))
