"""The parts that all services have: checkpoints, keys, roles, settings."""

from mutations.changes import Text, drop, instead, lacks, sets, swap
from mutations.mutation import Mutation

CHECKPOINT = "services/common/orca_common/checkpoint.py"
CHECKPOINTS = "tests/common/test_checkpoint.py"

MUTATIONS = [
    Mutation(
        "a GGUF's tensor may begin at any multiple of 8",
        "services/common/orca_common/gguf/header.py",
        "_placed",
        instead("offset % alignment", "offset % 8"),
        "tests/worker/test_gguf.py::test_headers_that_lie_are_refused",
    ),
    Mutation(
        "the tokenizer is not in a model's digest",
        CHECKPOINT,
        "read_checkpoint",
        drop("digest.update"),
        f"{CHECKPOINTS}::test_the_digest_is_of_the_tokenizer_and_the_sizes",
    ),
    Mutation(
        "end tokens of the config win over the generation's",
        CHECKPOINT,
        "_end_tokens",
        instead("said.get('eos_token_id')", "config.get('eos_token_id')"),
        f"{CHECKPOINTS}::test_the_end_tokens_are_those_of_the_generation",
    ),
    Mutation(
        "an end token may be the vocabulary's size",
        CHECKPOINT,
        "_end_tokens",
        swap("<", "<=", "vocab_size"),
        f"{CHECKPOINTS}::test_an_end_token_beyond_the_vocabulary_is_left_out",
    ),
    Mutation(
        "keys of the setting are forgotten when the file changes",
        "services/common/orca_common/api_keys.py",
        "ApiKeys._look",
        sets("keys", "self._read()"),
        "tests/common/test_api_keys.py::test_a_file_is_read_again_when_it_has_changed",
    ),
    Mutation(
        "a method without a role is open to all",
        "services/common/orca_common/roles.py",
        "check_role",
        instead("frozenset()", "ANY"),
        "tests/common/test_tls.py::test_a_method_without_a_role_is_for_nobody",
    ),
    Mutation(
        "ended requests are kept for 30 s",
        "services/common/orca_common/settings.py",
        "PoolSettings",
        sets("retention", "Field(default=30.0, gt=0)"),
        "tests/docs/test_pages.py::test_settings_of_the_pages_have_the_code_s_defaults",
    ),
    Mutation(
        "a digest of a download is in small letters",
        "services/common/orca_common/fetch_model.py",
        "fill_from_url",
        instead("stream.digest.hexdigest() != sha256.lower()", "stream.digest.hexdigest() != sha256"),
        "tests/common/test_fetch_model.py::test_an_archive_becomes_the_folder",
    ),
    Mutation(
        "a host without an address has a port in use",
        "services/common/orca_common/listening.py",
        "cannot_listen",
        instead("error.errno in NO_ADDRESS or not known", "error.errno in NO_ADDRESS"),
        "tests/common/test_service.py::test_a_host_that_has_no_address",
    ),
    Mutation(
        "health is open to no role",
        "services/common/orca_common/grpc_server.py",
        "GrpcServer.__init__",
        lacks("ANY"),
        "tests/common/test_tls.py::test_new_channels_and_running_servers_follow_a_change_of_authority",
    ),
    Mutation(
        "others may listen at a reserved port",
        "services/common/orca_common/listening.py",
        "",
        Text("    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)", "    # "),
        "tests/common/test_service.py::test_a_reserved_port_is_for_children_alone",
    ),
    Mutation(
        "a member's name may be spelled with escapes",
        "services/common/orca_common/forms.py",
        "",
        Text(r"""'nrbtf\\"'""", r"""'nrbtf\\"u'"""),
        "tests/endpoint/test_schemas.py::test_a_member_has_one_spelling",
    ),
]
