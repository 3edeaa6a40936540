"""The answers of Control calls: protobuf in, plain types out, and back."""

from __future__ import annotations

from protos import control_pb2 as cpb
from protos.codec import layout_from_proto, layout_to_proto
from protos.messages import LedgerAudit, Load, ModelInfo, ModelLimits, ServerInfo, ServerLedger
from protos.structs import fields_of, scalars_of


def server_info_to_proto(info: ServerInfo) -> cpb.ServerInfo:
    message = cpb.ServerInfo(**fields_of(info, omit=("layout", "servers")))
    if info.layout is not None:
        message.layout.CopyFrom(layout_to_proto(info.layout))
    message.servers.extend(server_info_to_proto(server) for server in info.servers)
    return message


def server_info_from_proto(message: cpb.ServerInfo) -> ServerInfo:
    return ServerInfo(
        **scalars_of(message, ServerInfo, omit=("layout", "servers", "rank_addresses")),
        layout=layout_from_proto(message.layout) if message.HasField("layout") else None,
        rank_addresses=tuple(message.rank_addresses),
        servers=tuple(server_info_from_proto(server) for server in message.servers),
    )


def model_info_to_proto(info: ModelInfo) -> cpb.ModelInfo:
    return cpb.ModelInfo(
        **fields_of(info.limits),
        dtype=info.dtype,
        num_parameters=info.num_parameters,
        architecture=info.architecture,
    )


def model_info_from_proto(message: cpb.ModelInfo) -> ModelInfo:
    limits = ModelLimits(
        **scalars_of(message, ModelLimits, omit=("eos_token_ids",)),
        eos_token_ids=tuple(message.eos_token_ids),
    )
    return ModelInfo(
        limits=limits,
        dtype=message.dtype,
        num_parameters=message.num_parameters,
        architecture=message.architecture,
    )


def load_to_proto(load: Load) -> cpb.Load:
    return cpb.Load(**fields_of(load))


def load_from_proto(message: cpb.Load) -> Load:
    return Load(**scalars_of(message, Load))


def ledger_to_proto(audit: LedgerAudit) -> cpb.Ledger:
    message = cpb.Ledger(
        entries_by_state=audit.entries_by_state,
        blocks_by_state=audit.blocks_by_state,
        blocks_by_owner=audit.blocks_by_owner,
        counters=audit.counters,
    )
    message.holders.extend(
        cpb.BlockHolder(block=block, holders=holders)
        for block, holders in sorted(audit.holders.items())
    )
    for server in audit.servers:
        item = message.servers.add(name=server.name, error=server.error)
        if server.ledger is not None:
            item.ledger.CopyFrom(ledger_to_proto(server.ledger))
    return message


def ledger_from_proto(message: cpb.Ledger) -> LedgerAudit:
    return LedgerAudit(
        entries_by_state=dict(message.entries_by_state),
        blocks_by_state=dict(message.blocks_by_state),
        blocks_by_owner=dict(message.blocks_by_owner),
        counters=dict(message.counters),
        holders={item.block: tuple(item.holders) for item in message.holders},
        servers=tuple(
            ServerLedger(
                name=item.name,
                ledger=ledger_from_proto(item.ledger) if item.HasField("ledger") else None,
                error=item.error,
            )
            for item in message.servers
        ),
    )
