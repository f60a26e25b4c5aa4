from orca.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("protocol", "engine", "term")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    engine: str
    term: int
    def __init__(self, protocol: _Optional[int] = ..., engine: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("protocol", "incarnation", "host", "pid", "epoch", "iteration", "slots", "rows", "model_digest", "max_positions", "vocab_size", "formation", "weights", "can", "blocks")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    FORMATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CAN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    incarnation: str
    host: str
    pid: int
    epoch: int
    iteration: int
    slots: int
    rows: _containers.RepeatedCompositeFieldContainer[HeldRow]
    model_digest: str
    max_positions: int
    vocab_size: int
    formation: Formation
    weights: str
    can: _containers.RepeatedScalarFieldContainer[str]
    blocks: BlockSource
    def __init__(self, protocol: _Optional[int] = ..., incarnation: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., epoch: _Optional[int] = ..., iteration: _Optional[int] = ..., slots: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[HeldRow, _Mapping]]] = ..., model_digest: _Optional[str] = ..., max_positions: _Optional[int] = ..., vocab_size: _Optional[int] = ..., formation: _Optional[_Union[Formation, _Mapping]] = ..., weights: _Optional[str] = ..., can: _Optional[_Iterable[str]] = ..., blocks: _Optional[_Union[BlockSource, _Mapping]] = ...) -> None: ...

class HeldRow(_message.Message):
    __slots__ = ("row", "claim", "length")
    ROW_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    row: int
    claim: int
    length: int
    def __init__(self, row: _Optional[int] = ..., claim: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class HostStoreRequest(_message.Message):
    __slots__ = ("term", "epoch")
    TERM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    term: int
    epoch: int
    def __init__(self, term: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class HostStoreResponse(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class RelayResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Formation(_message.Message):
    __slots__ = ("tensor_parallel", "pipeline_parallel", "stage", "tensor_rank", "block_size", "return_tokens", "hands_over")
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_RANK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDS_OVER_FIELD_NUMBER: _ClassVar[int]
    tensor_parallel: int
    pipeline_parallel: int
    stage: int
    tensor_rank: int
    block_size: int
    return_tokens: bool
    hands_over: bool
    def __init__(self, tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., stage: _Optional[int] = ..., tensor_rank: _Optional[int] = ..., block_size: _Optional[int] = ..., return_tokens: _Optional[bool] = ..., hands_over: _Optional[bool] = ...) -> None: ...

class FormRequest(_message.Message):
    __slots__ = ("term", "epoch", "formation", "store", "controllers")
    TERM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FORMATION_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    CONTROLLERS_FIELD_NUMBER: _ClassVar[int]
    term: int
    epoch: int
    formation: Formation
    store: str
    controllers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, term: _Optional[int] = ..., epoch: _Optional[int] = ..., formation: _Optional[_Union[Formation, _Mapping]] = ..., store: _Optional[str] = ..., controllers: _Optional[_Iterable[str]] = ...) -> None: ...

class FormResponse(_message.Message):
    __slots__ = ("slots", "free_bytes", "slot_bytes")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    slots: int
    free_bytes: int
    slot_bytes: int
    def __init__(self, slots: _Optional[int] = ..., free_bytes: _Optional[int] = ..., slot_bytes: _Optional[int] = ...) -> None: ...

class AllocateRequest(_message.Message):
    __slots__ = ("term", "epoch", "slots")
    TERM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    term: int
    epoch: int
    slots: int
    def __init__(self, term: _Optional[int] = ..., epoch: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...

class AllocateResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: BlockSource
    def __init__(self, blocks: _Optional[_Union[BlockSource, _Mapping]] = ...) -> None: ...

class BlockSource(_message.Message):
    __slots__ = ("address", "secret")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    address: str
    secret: bytes
    def __init__(self, address: _Optional[str] = ..., secret: _Optional[bytes] = ...) -> None: ...

class ControlMessage(_message.Message):
    __slots__ = ("iteration", "heartbeat", "adapters")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    heartbeat: Heartbeat
    adapters: AdapterTable
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., adapters: _Optional[_Union[AdapterTable, _Mapping]] = ...) -> None: ...

class AdapterTable(_message.Message):
    __slots__ = ("number", "entries")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    number: int
    entries: _containers.RepeatedCompositeFieldContainer[AdapterEntry]
    def __init__(self, number: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[AdapterEntry, _Mapping]]] = ...) -> None: ...

class AdapterEntry(_message.Message):
    __slots__ = ("id", "name", "folder")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    folder: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., folder: _Optional[str] = ...) -> None: ...

class Iteration(_message.Message):
    __slots__ = ("term", "epoch", "number", "free_rows", "admissions", "rows", "starts", "counts", "outputs", "tokens", "growths", "drafts", "pull", "trace")
    class TraceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TERM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FREE_ROWS_FIELD_NUMBER: _ClassVar[int]
    ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROWTHS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    term: int
    epoch: int
    number: int
    free_rows: _containers.RepeatedScalarFieldContainer[int]
    admissions: _containers.RepeatedCompositeFieldContainer[Admission]
    rows: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    outputs: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    growths: _containers.RepeatedCompositeFieldContainer[Growth]
    drafts: _containers.RepeatedScalarFieldContainer[int]
    pull: Pull
    trace: _containers.ScalarMap[str, str]
    def __init__(self, term: _Optional[int] = ..., epoch: _Optional[int] = ..., number: _Optional[int] = ..., free_rows: _Optional[_Iterable[int]] = ..., admissions: _Optional[_Iterable[_Union[Admission, _Mapping]]] = ..., rows: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., outputs: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., growths: _Optional[_Iterable[_Union[Growth, _Mapping]]] = ..., drafts: _Optional[_Iterable[int]] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ..., trace: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("row", "claim", "token_ids", "generated", "sampling", "computed", "root")
    ROW_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    row: int
    claim: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    generated: int
    sampling: _sampling_pb2.SamplingParams
    computed: int
    root: bytes
    def __init__(self, row: _Optional[int] = ..., claim: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., generated: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., computed: _Optional[int] = ..., root: _Optional[bytes] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("admission", "blocks", "handed")
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HANDED_FIELD_NUMBER: _ClassVar[int]
    admission: Admission
    blocks: _containers.RepeatedScalarFieldContainer[int]
    handed: Handed
    def __init__(self, admission: _Optional[_Union[Admission, _Mapping]] = ..., blocks: _Optional[_Iterable[int]] = ..., handed: _Optional[_Union[Handed, _Mapping]] = ...) -> None: ...

class Handed(_message.Message):
    __slots__ = ("engine", "epoch", "claim", "row", "positions", "sources")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    engine: str
    epoch: int
    claim: int
    row: int
    positions: int
    sources: _containers.RepeatedCompositeFieldContainer[BlockSource]
    def __init__(self, engine: _Optional[str] = ..., epoch: _Optional[int] = ..., claim: _Optional[int] = ..., row: _Optional[int] = ..., positions: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[BlockSource, _Mapping]]] = ...) -> None: ...

class Growth(_message.Message):
    __slots__ = ("row", "blocks", "shared")
    ROW_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    row: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    shared: int
    def __init__(self, row: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., shared: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("iteration", "heartbeat", "times", "leaving", "pulled", "adapters")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    iteration: IterationReport
    heartbeat: Heartbeat
    times: Times
    leaving: Leaving
    pulled: Pulled
    adapters: AdaptersHeld
    def __init__(self, iteration: _Optional[_Union[IterationReport, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., times: _Optional[_Union[Times, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., pulled: _Optional[_Union[Pulled, _Mapping]] = ..., adapters: _Optional[_Union[AdaptersHeld, _Mapping]] = ...) -> None: ...

class Pulled(_message.Message):
    __slots__ = ("number", "bytes", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    bytes: int
    error: str
    def __init__(self, number: _Optional[int] = ..., bytes: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdaptersHeld(_message.Message):
    __slots__ = ("number", "adapters")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterHeld]
    def __init__(self, number: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[AdapterHeld, _Mapping]]] = ...) -> None: ...

class AdapterHeld(_message.Message):
    __slots__ = ("id", "fingerprint", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    fingerprint: str
    error: str
    def __init__(self, id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Times(_message.Message):
    __slots__ = ("stages",)
    STAGES_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[StageTimes]
    def __init__(self, stages: _Optional[_Iterable[_Union[StageTimes, _Mapping]]] = ...) -> None: ...

class IterationReport(_message.Message):
    __slots__ = ("epoch", "number", "token_ids", "made", "logprobs", "times", "error", "peer_lost", "not_finite", "stuck", "waiting", "tops", "prompts")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PEER_LOST_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    STUCK_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TOPS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    made: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    times: StageTimes
    error: str
    peer_lost: bool
    not_finite: _containers.RepeatedScalarFieldContainer[int]
    stuck: _containers.RepeatedScalarFieldContainer[int]
    waiting: _containers.RepeatedScalarFieldContainer[int]
    tops: _containers.RepeatedCompositeFieldContainer[Scores]
    prompts: _containers.RepeatedCompositeFieldContainer[Scores]
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., made: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., times: _Optional[_Union[StageTimes, _Mapping]] = ..., error: _Optional[str] = ..., peer_lost: _Optional[bool] = ..., not_finite: _Optional[_Iterable[int]] = ..., stuck: _Optional[_Iterable[int]] = ..., waiting: _Optional[_Iterable[int]] = ..., tops: _Optional[_Iterable[_Union[Scores, _Mapping]]] = ..., prompts: _Optional[_Iterable[_Union[Scores, _Mapping]]] = ...) -> None: ...

class Scores(_message.Message):
    __slots__ = ("index", "scores")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    index: int
    scores: bytes
    def __init__(self, index: _Optional[int] = ..., scores: _Optional[bytes] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("received", "started", "computed", "sent", "taken", "control_bytes", "data_bytes", "iteration", "waited", "stage", "tensor_rank")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    CONTROL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_RANK_FIELD_NUMBER: _ClassVar[int]
    received: int
    started: int
    computed: int
    sent: int
    taken: int
    control_bytes: int
    data_bytes: int
    iteration: int
    waited: int
    stage: int
    tensor_rank: int
    def __init__(self, received: _Optional[int] = ..., started: _Optional[int] = ..., computed: _Optional[int] = ..., sent: _Optional[int] = ..., taken: _Optional[int] = ..., control_bytes: _Optional[int] = ..., data_bytes: _Optional[int] = ..., iteration: _Optional[int] = ..., waited: _Optional[int] = ..., stage: _Optional[int] = ..., tensor_rank: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("number", "iteration", "epoch")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    number: int
    iteration: int
    epoch: int
    def __init__(self, number: _Optional[int] = ..., iteration: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankTable(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankEntry]
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankEntry, _Mapping]]] = ...) -> None: ...

class RankEntry(_message.Message):
    __slots__ = ("local_rank", "address", "pid", "restarts")
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    local_rank: int
    address: str
    pid: int
    restarts: int
    def __init__(self, local_rank: _Optional[int] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., restarts: _Optional[int] = ...) -> None: ...

class FenceRequest(_message.Message):
    __slots__ = ("local_rank", "pid", "verdict")
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    local_rank: int
    pid: int
    verdict: str
    def __init__(self, local_rank: _Optional[int] = ..., pid: _Optional[int] = ..., verdict: _Optional[str] = ...) -> None: ...

class FenceResponse(_message.Message):
    __slots__ = ("killed",)
    KILLED_FIELD_NUMBER: _ClassVar[int]
    killed: bool
    def __init__(self, killed: _Optional[bool] = ...) -> None: ...
