"""The compiled extension as type checkers see it. tests/test_extension.py compares it with what is
compiled.

Positional-only names are of this file alone: the extension takes those arguments by position.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Buffer

class Engine:
    """csrc/io/engine.hpp. Paths may be given as bytes, as the operating system has them."""

    def __init__(
        self,
        *,
        path: str,
        queue_depth: int,
        threads: int,
        request_bytes: int,
        pool_bytes: int,
        poison: bool,
        rules: Sequence[dict[str, Any]],
        seed: int,
    ) -> None: ...
    @property
    def effective(self) -> str: ...
    @property
    def fallback_reason(self) -> str: ...
    @property
    def mapped_bytes(self) -> int: ...
    def open(self, path: str | bytes, mode: str, direct: bool | None) -> int: ...
    def close_file(self, number: int, /) -> None: ...
    def file_info(self, number: int, /) -> tuple[int, bool, int]:
        """(size_bytes, whether it bypasses the page cache, alignment_bytes)."""

    def allocate(self, number: int, size_bytes: int, /) -> bool: ...
    def truncate(self, number: int, size_bytes: int, /) -> None: ...
    def sync(self, number: int, /) -> None: ...
    def sync_directory(self, path: str | bytes, /) -> None: ...
    def before(self, operation: str, path: str | bytes, /) -> None: ...
    def submit(
        self,
        *,
        reading: bool,
        file: Tensor,
        offset_bytes: Tensor,
        size_bytes: Tensor,
        out_offset_bytes: Tensor | None,
        crc32c: Tensor | None,
        memory: Tensor | None,
        gap_bytes: int,
        priority: int,
        deadline_s: float,
    ) -> Future: ...
    def stats(self) -> dict[str, int]: ...
    def memory(self, size_bytes: int, /) -> Tensor: ...
    def close(self, grace_s: float, /) -> None: ...

class Future:
    """A transfer of an `Engine`."""

    @property
    def memory(self) -> Tensor: ...
    @property
    def position_bytes(self) -> Tensor: ...
    @property
    def bytes_asked(self) -> int: ...
    @property
    def bytes_moved(self) -> int: ...
    @property
    def request_count(self) -> int: ...
    def next(self, at_least: int, timeout_s: float) -> tuple[Tensor, bool]: ...
    def cancel(self) -> None: ...
    def done(self) -> bool: ...
    def is_over(self) -> bool: ...

class KeptRecords:
    """Records of a store that a stream may read: their places and the rules they are scored by."""

class RecordStream:
    """csrc/device/record_stream.hpp."""

    def __init__(self, engine: Engine, window_bytes: int, max_workers: int) -> None: ...
    def push(
        self,
        kept: KeptRecords,
        numbers: Tensor,
        queries: Sequence[tuple[Tensor, Tensor, float]],
        pair_item: Tensor | None,
        pair_query: Tensor | None,
        is_urgent: bool,
        gap_bytes: int,
        deadline_s: float,
        threads: int,
        /,
    ) -> RecordTicket:
        """`queries`: (tokens, CLS, weight of CLS) each. `pair_item`, `pair_query`: which records
        are scored for which queries."""

    def clear(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

class RecordTicket:
    """Records that a `RecordStream` reads and scores."""

    def next(self, at_least: int, timeout_s: float) -> tuple[Tensor, bool]: ...
    def scores(self) -> Tensor: ...
    def score_more(self, pair_item: Tensor, pair_query: Tensor, /) -> Tensor: ...
    def memory(self) -> tuple[Tensor, Tensor] | None:
        """(uint8 memory, where each record begins in it); None while the reads wait for the
        window."""

    @property
    def damaged(self) -> int: ...
    def costs(self) -> tuple[int, int, int, float, float, float]:
        """(bytes_asked, bytes_moved, requests, waiting_s, computing_s, age_s)."""

    def forget(self) -> None: ...

class RowStream:
    """csrc/device/row_stream.hpp."""

    def __init__(self, engine: Engine, window_bytes: int, deadline_s: float) -> None: ...
    def push(
        self, geometry: dict[str, Any], segments: Tensor, sums: Sequence[Tensor], unit_bytes: int, /
    ) -> int: ...
    def front(self) -> int: ...
    def clear(self) -> None: ...
    def reach(self, window_bytes: int, /) -> None: ...
    def visit(self, ticket: int, see: Callable[[Tensor, Tensor], object], /) -> None: ...
    def name_pages(self, ticket: int, naming: PageNaming, /) -> None: ...
    def stats(self) -> dict[str, Any]: ...

class PageNaming:
    """csrc/device/draft/page_naming.hpp: attention of some queries that keeps the pages which weigh
    most, in the tensors of a tier."""

    def __init__(
        self,
        *,
        q: Tensor,
        dv: int,
        position: Tensor | None = None,
        last_position: Tensor | None = None,
        first_visible: Tensor | None = None,
        visible: Tensor | None = None,
        window: int = 0,
        soft_cap: float = 0.0,
        slopes: Tensor | None = None,
        geometry: dict[str, Any],
        k: Tensor,
        v: Tensor,
        seen: Tensor,
        lse: Tensor,
        stays: Tensor,
        number: Tensor,
        place: Tensor,
        end: int,
        threads: int,
    ) -> None:
        """`place`: int64 [sequences], which of the tier's each is; -1: none. `end`: behind the last
        position that will come."""

    def see(self, memory: Tensor, pieces: Tensor, /) -> None: ...
    def finish(self) -> tuple[Tensor, Tensor]:
        """(o, lse) over all rows so far."""

class LinkTicket:
    """A transfer of a `LinkClock`."""

class LinkClock:
    """csrc/device/link_clock.hpp."""

    def __init__(self, links: Sequence[tuple[str, float]], lanes: int, stretch: float) -> None:
        """`links`: their names and latencies in seconds. `lanes`: in each of which transfers follow
        one another."""

    def transfer(
        self,
        path: Sequence[tuple[int, float, float]],
        lane: int,
        size_bytes: int,
        before_s: float,
        after: Sequence[LinkTicket],
        member: int = -1,
    ) -> LinkTicket:
        """`path`: (which link, amount of work there, rate per second) of each leg."""

    def wait(
        self,
        tickets: Sequence[LinkTicket],
        asked_s: float | None,
        deadline_s: float,
        member: int = -1,
    ) -> float | None:
        """When the last of them ended; None at the deadline."""

    def done(self, ticket: LinkTicket, /) -> bool: ...
    def cancel(self, ticket: LinkTicket, /) -> None: ...
    def now(self) -> float: ...
    def advance(self, to_s: float, /) -> None: ...
    def join(self) -> int: ...
    def rest(self, member: int, /) -> None: ...
    def resume(self, member: int, /) -> None: ...
    def leave(self, member: int, /) -> None: ...
    def at_work(self) -> int: ...
    def times(self) -> tuple[float, float, float]:
        """Virtual seconds: (now, waited, late)."""

    def traffic(self) -> list[tuple[str, float, float, int]]:
        """(name, amount, busy virtual seconds, transfers) of each link."""

    def close(self) -> None: ...

class ClusterTicket:
    """Clusters that a `ClusterStream` reads and measures."""

    def next(self, at_least: int, timeout_s: float) -> tuple[Tensor, bool]: ...
    def replies(self) -> Tensor:
        """uint8 [8 for each vector]: float32 distance, int32 id."""

    def costs(self) -> dict[str, Any]: ...
    def forget(self) -> None: ...

class ClusterStream:
    """csrc/device/cluster_stream.hpp."""

    def __init__(self, engine: Engine, window_bytes: int, max_workers: int) -> None: ...
    def push(
        self,
        query: Tensor,
        fmt: str,
        metric: str,
        file: int,
        path: bytes,
        clusters: Tensor,
        offset_bytes: Tensor,
        n_vectors: Tensor,
        crc32c: Tensor,
        deadline_s: float,
        /,
    ) -> ClusterTicket: ...
    def clear(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

class ListEncoder:
    """csrc/cpu/postings/list.hpp."""

    def __init__(self, salt: int, kind: int) -> None: ...
    def begin_list(self, term: int, name: Tensor, is_digest: bool, /) -> None: ...
    def add(self, records: Tensor, values: Tensor, /) -> None: ...
    def end_layer(self, is_last: bool, /) -> int: ...
    def add_lists(
        self,
        first_term: int,
        names: Tensor,
        name_begin: Tensor,
        digests: Tensor,
        counts: Tensor,
        first_counts: Tensor,
        records: Tensor,
        values: Tensor,
        /,
    ) -> tuple[Tensor, Tensor]: ...
    def take(self) -> Tensor: ...

class PostingsDictionaries:
    """csrc/postings/plan.hpp, in csrc/bindings/postings_search.cpp: of the segments of a
    collection."""

    def __init__(self) -> None: ...
    def add(
        self,
        hashes: Buffer,
        first: Buffer,
        df: Buffer,
        first_layer: Buffer | None,
        exponents: Buffer | None,
        removed: Buffer,
        removed_df: Buffer,
        kind: int,
        /,
    ) -> None: ...
    def look_up(self, hashes: Tensor, /) -> tuple[Tensor, list[tuple[int, int, int]]]:
        """(numbers [segments, n], of hashes that several terms share: segment, place, how many)."""

    def plan(
        self,
        numbers: Tensor,
        tokens: Tensor,
        token_weights: Tensor,
        first_token: Tensor,
        variant: int,
        n_records: int,
        absent_part: float,
        /,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(weights [n], as the int64 of the same bits; absent [n]; lists [lists, 12])."""

class PostingsTicket:
    """csrc/postings/search.hpp. `query`: what `Extension.search_postings` takes, of one query."""

    def __init__(self, engine: Engine, query: dict[str, Any], /) -> None: ...
    def result(self, lists: int, /) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
    def cancel(self) -> None: ...

# In `Extension` the plain names are its own attributes.
_KeptRecords = KeptRecords
_RowStream = RowStream
_Engine = Engine

class Extension:
    """The module itself, as `espnx.storage.native.load_native` returns it."""

    ClusterStream: type[ClusterStream]
    ClusterTicket: type[ClusterTicket]
    Codebook: type[Codebook]
    Engine: type[Engine]
    Future: type[Future]
    GraphSearch: type[GraphSearch]
    GraphSearcher: type[GraphSearcher]
    GraphSearchOptions: type[GraphSearchOptions]
    AddedGraph: type[AddedGraph]
    GraphView: type[GraphView]
    KeptRecords: type[KeptRecords]
    LinkClock: type[LinkClock]
    LinkTicket: type[LinkTicket]
    ListEncoder: type[ListEncoder]
    PageLayout: type[PageLayout]
    PageNaming: type[PageNaming]
    PostingsDictionaries: type[PostingsDictionaries]
    PostingsTicket: type[PostingsTicket]
    RecordStream: type[RecordStream]
    RecordTicket: type[RecordTicket]
    RoundWalk: type[RoundWalk]
    RowStream: type[RowStream]
    Vamana: type[Vamana]
    ROW_SEGMENT_FIELDS: tuple[str, ...]
    ROW_PIECE_FIELDS: tuple[str, ...]

    @staticmethod
    def set_error_factory(factory: Callable[..., Exception], /) -> None: ...
    @staticmethod
    def free_bytes(path: str | bytes, /) -> int: ...
    @staticmethod
    def reserve_file_numbers() -> int: ...
    @staticmethod
    def crc32c(address: int, size_bytes: int, seed: int, /) -> int: ...
    @staticmethod
    def pack_plan(
        file_sizes: Tensor,
        alignments: Tensor,
        file: Tensor,
        offset_bytes: Tensor,
        size_bytes: Tensor,
        gap_bytes: int,
        limit_bytes: int,
        /,
    ) -> tuple[Any, ...]: ...
    @staticmethod
    def lay_out_records(
        n_tokens: Tensor, fixed_bytes: int, row_bytes: int, begin_bytes: int, /
    ) -> tuple[Tensor, int]: ...
    @staticmethod
    def locate_records(
        records: Tensor,
        n_tokens: Tensor,
        group_offset_bytes: Tensor,
        segment_begin: Tensor,
        fixed_bytes: int,
        row_bytes: int,
        /,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(segment, offset_bytes, size_bytes) of each."""

    @staticmethod
    def keep_records(
        n_tokens: Tensor,
        group_offset_bytes: Tensor,
        segment_begin: Tensor,
        files: Tensor,
        rules: dict[str, Any],
        centroids: Tensor | None,
        bucket_weights: Tensor | None,
        /,
    ) -> _KeptRecords: ...
    @staticmethod
    def decode_list(
        data: Tensor,
        salt: int,
        kind: int,
        n_records: int,
        term: int,
        name: Tensor,
        is_digest: bool,
        first_layer_bytes: int,
        /,
    ) -> tuple[Tensor, Tensor, int] | str | None:
        """(records, values, postings of the first of two layers); what is wrong with it; None: it
        is another term's."""

    @staticmethod
    def read_lists(
        buffer: Tensor,
        offset_bytes: Tensor,
        size_bytes: Tensor,
        first_layer_bytes: Tensor,
        names: Tensor,
        name_begin: Tensor,
        digests: Tensor,
        first_term: int,
        salt: int,
        kind: int,
        n_records: int,
        df: Tensor,
        kept: Tensor | None,
        /,
    ) -> tuple[Tensor, Tensor, Tensor, int, str]:
        """(counts, records, values, the first damaged list or -1, what is wrong with it)."""

    @staticmethod
    def scan_postings(
        buffer: Tensor,
        offset_bytes: Tensor,
        size_bytes: Tensor,
        first_layer_bytes: Tensor,
        terms: Tensor,
        weights: Tensor,
        absent: Tensor,
        salt: int,
        kind: int,
        n_records: int,
        k: int,
        lengths: Tensor | None,
        norms: Tensor | None,
        variant: int,
        k1: float,
        delta: float,
        constant: float,
        allowed: Tensor | None,
        /,
    ) -> tuple[Tensor, Tensor]:
        """As `espnx.ops.postings`, of tensors that are contiguous; float64 as the int64 of the same
        bits."""

    @staticmethod
    def write_forward(
        salt: int,
        kind: int,
        term_bytes: int,
        first: int,
        counts: Tensor,
        terms: Tensor,
        values: Tensor,
        offset_bytes: Tensor,
        size_bytes: Tensor,
        total: int,
        /,
    ) -> Tensor: ...
    @staticmethod
    def score_forward(
        buffer: Tensor,
        position_bytes: Tensor,
        size_bytes: Tensor,
        records: Tensor,
        salt: int,
        kind: int,
        term_bytes: int,
        terms: Tensor,
        weights: Tensor,
        /,
    ) -> tuple[Tensor, int, str]:
        """(scores, the first damaged record or -1, what is wrong with it)."""

    @staticmethod
    def search_postings(
        engine: _Engine, query: dict[str, Any], /
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(numbers [Q, k], scores [Q, k], costs [Q, 3], lists of other terms). `query`: see
        csrc/bindings/postings_search.cpp."""

    @staticmethod
    def prune_candidates(
        *,
        targets: Tensor,
        candidates: Tensor,
        vectors: Tensor,
        degree: int,
        alpha: float,
        threads: int,
    ) -> Tensor: ...
    @staticmethod
    def attend_rows(
        stream: _RowStream | None,
        ticket: int,
        *,
        q: Tensor,
        dv: int,
        rows: tuple[Tensor, Tensor, int, int, int] | None = None,
        position: Tensor | None = None,
        last_position: Tensor | None = None,
        first_visible: Tensor | None = None,
        visible: Tensor | None = None,
        window: int = 0,
        soft_cap: float = 0.0,
        slopes: Tensor | None = None,
        pages: tuple[Tensor, Tensor, Tensor] | None = None,
        threads: int,
    ) -> tuple[Tensor, Tensor]:
        """(o, lse). `rows`: K, V, how many to skip, how many count, and the position of the first:
        those in memory; `pages`: further K, V and which of them are seen."""
    @staticmethod
    def pack_pages(k: Tensor, v: Tensor, pages: Tensor, threads: int) -> None:
        """Writes pages of four bits (csrc/cpu/packed/packed.hpp)."""
    @staticmethod
    def attend_packed(
        pages: Tensor,
        n_pages: int,
        *,
        q: Tensor,
        dv: int,
        rows: tuple[Tensor, Tensor, int, int, int] | None = None,
        position: Tensor | None = None,
        last_position: Tensor | None = None,
        first_visible: Tensor | None = None,
        visible: Tensor | None = None,
        window: int = 0,
        soft_cap: float = 0.0,
        slopes: Tensor | None = None,
        threads: int,
    ) -> tuple[Tensor, Tensor]:
        """(o, lse) over pages of four bits (csrc/cpu/packed/packed.hpp), and `rows` as of
        `attend_rows`."""
    @staticmethod
    def maxsim(
        query: Tensor,
        buffer: Tensor,
        offset_bytes: Tensor,
        n_tokens: Tensor,
        fmt: str,
        threads: int,
        centroids: Tensor | None,
        bucket_weights: Tensor | None,
        /,
    ) -> Tensor:
        """As `espnx.ops.maxsim`, of tensors that are contiguous."""

    @staticmethod
    def crc32c_ranges(
        buffer: Tensor, offset_bytes: Tensor, size_bytes: Tensor, seed: int, /
    ) -> Tensor:
        """As `espnx.ops.crc32c_ranges`, of tensors that are contiguous."""

    @staticmethod
    def gather(
        buffer: Tensor, offset_bytes: Tensor, begin: Tensor, out: Tensor, threads: int, /
    ) -> None:
        """csrc/cpu/gather.hpp: record i goes to byte ``begin[i]`` of ``out``."""

    @staticmethod
    def look_at_records(
        offset_bytes: Tensor,
        count: Tensor,
        unit_bytes: int,
        count_max: int,
        buffer_bytes: int,
        address: int,
        begin: Tensor | None,
        /,
    ) -> tuple[int, int, int, int, int]:
        """csrc/cpu/places.hpp: (the first record outside, or -1; multiples of the addresses and of
        the counts; the largest count; all of them)."""

    @staticmethod
    def look_at_blocks(
        offset_bytes: Tensor,
        n_rows: Tensor,
        block_rows: int,
        block_bytes: int,
        rows_max: int,
        buffer_bytes: int,
        address: int,
        /,
    ) -> tuple[bool, int, int]:
        """csrc/cpu/places.hpp: (whether all is right; multiple of the addresses; most rows)."""

    @staticmethod
    def pack(tables: Sequence[Tensor], out: Tensor, /) -> None:
        """The tables' bytes, each at the next multiple of 16 in ``out``."""

    @staticmethod
    def distances(
        query: Tensor, buffer: Tensor, offset_bytes: Tensor, fmt: str, metric: str, threads: int, /
    ) -> Tensor:
        """As `espnx.ops.distances`, of tensors that are contiguous; an int8 query as the uint8 it
        is in memory."""

    @staticmethod
    def fit_product(
        vectors: Tensor, begin: Tensor, rounds: int, seed: int, threads: int, /
    ) -> Tensor:
        """As `espnx.ops.quantise.fit_product_quantizer`, of all the vectors."""

    @staticmethod
    def encode_product(
        vectors: Tensor, begin: Tensor, centroids: Tensor, threads: int, /
    ) -> Tensor:
        """As `espnx.ops.quantise.encode_product`."""

    @staticmethod
    def attention(
        query: Tensor,
        buffer: Tensor,
        block_offset_bytes: Tensor,
        n_rows: Tensor,
        block_rows: int,
        fmt: str,
        scale: float,
        dv: int,
        visible: Tensor | None,
        last_position: Tensor | None,
        threads: int,
        /,
    ) -> tuple[Tensor, Tensor]:
        """As `espnx.ops.attention`, of a query in float32 and tensors that are contiguous."""

    @staticmethod
    def accelerator(
        query: Tensor,
        buffer: Tensor,
        pieces: Tensor,
        block_rows: int,
        scale: float,
        first_visible: Tensor | None,
        visible: Tensor | None,
        last_position: Tensor | None,
        scores: Tensor | None,
        values: Tensor | None,
        buffered_position: int,
        threads: int,
        /,
    ) -> tuple[Tensor, Tensor]:
        """As `espnx.ops.accelerator.accelerator`; `scores` and `values` are those of `Buffered`."""

    @staticmethod
    def accelerator_scores(query: Tensor, rows: Tensor, scale: float, threads: int, /) -> Tensor:
        """As `espnx.ops.accelerator.accelerator_scores`."""

    @staticmethod
    def walk_queues(
        parts: Sequence[tuple[int, float, float]],
        routes: Sequence[Sequence[tuple[int, float, int]]],
        route: Tensor,
        client: Tensor,
        at_s: Sequence[float],
        after_first: Sequence[int],
        after: Sequence[int],
        n_before: int,
        n_until: int,
    ) -> dict[str, Any]:
        """csrc/simulate/queues.hpp. `parts`: (places, latency in seconds, bytes a second).
        `routes`: (part, bytes, step until whose end the place is kept) of each step.
        `after`: whom each command waits for, from `after_first` of it to that of the next."""

    @staticmethod
    def cpu_level() -> int:
        """The instruction set in force: 0 portable, 1 AVX2, 2 AVX-512, 3 VNNI, 4 AMX."""

    @staticmethod
    def set_cpu_level(level: int, /) -> int:
        """Puts one in force, in this process; -1: the best."""

class Vamana:
    """csrc/graph/build/vamana.hpp."""

    def __init__(
        self,
        *,
        vectors: Tensor,
        format: str,  # noqa: A002
        degree: int,
        list_size: int,
        alpha: float,
        passes: int,
        saturate: bool,
        threads: int,
        seed: int,
    ) -> None: ...
    @staticmethod
    def from_edges(
        *,
        vectors: Tensor,
        format: str,  # noqa: A002
        neighbours: Tensor,
        counts: Tensor,
        medoid: int,
        list_size: int,
    ) -> Vamana: ...
    @property
    def medoid(self) -> int: ...
    def build(self, progress: Callable[[int, int], None], /) -> None: ...
    def connect(self, entries: Tensor, /) -> int: ...
    def leading_to(self, node: int, /) -> Tensor: ...
    def edges(self) -> tuple[Tensor, Tensor]: ...
    def pack(self, nodes_per_page: int, /) -> Tensor: ...

class AddedGraph:
    """csrc/graph/build/added.hpp."""

    def __init__(
        self,
        *,
        dim: int,
        format: str,  # noqa: A002
        metric: str,
        degree: int,
        list_size: int,
        alpha: float,
    ) -> None: ...
    @property
    def inserted(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    def hold(self, rows: Tensor, /) -> None: ...
    def insert_to(self, end: int, /) -> None: ...
    def search(
        self,
        *,
        queries: Tensor,
        may: Tensor,
        ids: Tensor,
        k: int,
        list_size: int,
        threads: int,
        known: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

class RoundWalk:
    """csrc/graph/rounds.hpp."""

    def __init__(
        self,
        *,
        n_nodes: int,
        k: int,
        list_size: int,
        beam_width: int,
        by_codes: bool,
        upper_layers: int | None,
    ) -> None: ...
    def run(self, source: Any, entries: Tensor, /) -> tuple[Tensor, Tensor]: ...
    def unknown(self, numbers: Tensor, /) -> Tensor: ...
    def arrived(
        self,
        numbers: Tensor,
        ids: Tensor,
        distances: Tensor,
        neighbours: Tensor,
        begin: Tensor,
        end: Tensor,
        /,
    ) -> None: ...

class GraphSearch:
    """A search under way; see csrc/graph/search.hpp."""

    def partial(self, pages: int, /) -> tuple[Tensor, Tensor]: ...
    def finish(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...
    def cancel(self) -> None: ...

class PageLayout:
    """csrc/graph/page.hpp."""

    def __init__(
        self,
        *,
        n: int,
        dim: int,
        format: str,  # noqa: A002
        degree: int,
        code_bytes: int,
        inline_codes: int,
        paged_codes: bool,
        disk_pq_bytes: int,
        page_bytes: int,
        nodes_per_page: int,
    ) -> None: ...

class Codebook:
    """csrc/graph/codebook.hpp."""

    def __init__(
        self, *, parts: Sequence[int], centroids: Tensor, rotation: Tensor | None
    ) -> None: ...

class GraphView:
    """csrc/graph/walk.hpp."""

    def __init__(
        self,
        *,
        pages: Sequence[tuple[str, int]],
        code_pages: tuple[str, int],
        layout: PageLayout,
        metric: str,
        book: Codebook,
        disk_book: Codebook | None,
        codes: Tensor | None,
        part_nodes: Tensor,
        part_files: Tensor,
        part_pages: Tensor,
        part_salts: Tensor,
        copies: int,
        entries: Tensor,
        entry_codes: Tensor,
        entries_begin: Tensor,
    ) -> None: ...

class GraphSearchOptions:
    """csrc/graph/search.hpp."""

    def __init__(
        self,
        *,
        path: str,
        direct: bool | None,
        threads: int,
        walks: int,
        code_cache_bytes: int,
        grace_s: float = 1.0,
        rules: Sequence[dict[str, Any]],
        seed: int,
    ) -> None: ...

class GraphSearcher:
    """csrc/graph/search.hpp."""

    def __init__(self, graph: GraphView, options: GraphSearchOptions) -> None: ...
    @property
    def path(self) -> tuple[str, str, bool]: ...
    def start(
        self,
        *,
        queries: Tensor,
        queries_f32: Tensor,
        k: int,
        list_size: int,
        far_list_size: int,
        beam_width: int,
        stop_beyond: float,
        filter: dict[str, Any] | None,  # noqa: A002
        absent: Tensor | None,
        parts: tuple[Tensor, Tensor] | None,
        deadline_s: float,
    ) -> GraphSearch: ...
    def close(self) -> None: ...
