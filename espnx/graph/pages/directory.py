"""A graph's directory, or the sections of a file that it is, parsed and never believed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ... import errors
from ...ops.distances import DIM_MAX
from ...storage import NativeEngine
from ...storage.files import Region, crc32c, read_region
from ...storage.manifest import NAME, read_manifest
from ...storage.parse import Fields, check_file_size
from ..codes.codebook import Codebook, unpack_codebook
from ..format import (
    CENTROIDS,
    CLUSTERS,
    CLUSTERS_MAX,
    CLUSTERS_VERSION,
    CODEBOOK,
    CODES,
    DIRECTORIES_MAX,
    DISK_CODEBOOK,
    ENTRIES,
    MAGIC,
    METRICS,
    N_ENTRIES_MAX,
    N_MAX,
    NODES,
    PAGE_FILES_MAX,
    ROWS_MAX,
    VERSION,
    FilteredRecall,
    GraphFacts,
    GraphSections,
    GraphShare,
    RecallPoint,
    file_sizes,
    page_files,
    parts_of,
    section_of,
    whole_files,
)
from ..layout import (
    CODE_PAGE_BYTES,
    HEADER,
    MAX_DEGREE_MAX,
    NODE_FORMATS,
    PAGE_BYTES_MAX,
    PAGE_UNIT_BYTES,
    PageLayout,
)
from ..parts import TABLE, Clusters, PageFile, lost_directory

_REBUILD = "restore the graph from a copy, or build it again"
_CURVE_POINTS_MAX = 64


def read_graph(
    engine: NativeEngine, source: str | os.PathLike[str] | GraphSections, *, partial: bool = False
) -> GraphFacts:
    """What a directory, or what lies inside another file, says of its graph. Its pages are checked
    when they are read.

    Args:
        partial: whether some of several directories of pages may be lost, and not all.

    Raises:
        StoreNotFoundError: no graph was published there.
        FormatError, ChecksumError, TruncatedFileError, FileMissingError: damaged, or of another
            kind or version.
    """
    if isinstance(source, GraphSections):
        where, fields = source.where, Fields(source.manifest, source.where, fix=_REBUILD)
    else:
        where = os.fspath(source)
        fields = Fields(read_graph_manifest(engine, where), os.path.join(where, NAME), fix=_REBUILD)
    n_clusters = fields.whole("n_clusters", 0, CLUSTERS_MAX) if "n_clusters" in fields else None
    if n_clusters is not None and isinstance(source, GraphSections):
        fields.refuse("n_clusters", "none: sections hold one graph", n_clusters)
    layout = _read_layout(fields, N_MAX if n_clusters is None else ROWS_MAX)
    id_end = _read_id_end(fields, layout, n_clusters)
    sums = fields.inner("sums")
    holds_codes = layout.format == "pq"
    names = [
        CODEBOOK,
        ENTRIES,
        *([CODES] if layout.codes_in == "memory" else []),
        *([DISK_CODEBOOK] if holds_codes else []),
        *([] if n_clusters is None else [CLUSTERS, CENTROIDS]),
    ]
    expected = {name: sums.whole(name, 0, 2**32 - 1) for name in names}
    most = N_ENTRIES_MAX if n_clusters is None else N_ENTRIES_MAX * n_clusters
    n_entries = fields.whole("n_entries", min(1, layout.n), most)
    parts = _read_parts(fields, "parts", layout.code_bytes, layout.dim)
    disk_parts = (
        _read_parts(fields, "disk_parts", layout.disk_pq_bytes, layout.dim) if holds_codes else None
    )
    ceiling = fields.real("recall_ceiling") if holds_codes and "recall_ceiling" in fields else None
    generation = fields.whole("generation", 1)
    clusters = (
        None
        if n_clusters is None
        else _read_clusters(engine, where, generation, fields, layout, n_entries, expected)
    )
    rotated = _read_rotated(fields, has_disk_codebook=holds_codes)
    sizes = file_sizes(layout, n_entries, rotated, clusters, id_end)
    salt = int(fields.hexadecimal("salt", 16), 16)
    directories: list[str] = []
    made: list[Region] = []
    if clusters is not None:
        directories = _read_directories(fields, clusters)
        del sizes[NODES]
        made = page_files(where, directories, salt, layout, clusters.page_files)
    regions = _located(source, where, generation, sizes)

    def codebook(name: str, begin: np.ndarray) -> Codebook:
        # torch takes no memory that is read-only
        values = np.frombuffer(read_whole(engine, regions, name, expected), "<f4").copy()
        return unpack_codebook(begin, values, layout.dim)

    data = read_whole(engine, regions, ENTRIES, expected)
    entries = np.frombuffer(data, "<u4", n_entries).astype(np.int64)
    of_part = parts_of(layout, n_entries, clusters, salt)
    if (entries >= np.repeat(of_part.nodes, of_part.n_entries)).any():
        raise errors.FormatError(
            "entry point of a graph",
            path=regions[ENTRIES].path,
            got=int(entries.max()),
            fix=_REBUILD,
        )
    return GraphFacts(
        where,
        regions,
        layout,
        fields.choice("metric", METRICS),
        salt,
        codebook(CODEBOOK, parts),
        entries,
        np.frombuffer(data, np.uint8, offset=4 * n_entries).reshape(n_entries, layout.code_bytes),
        expected,
        fields.inner("options").values(),
        _read_recall(fields, "recall"),
        None if disk_parts is None else codebook(DISK_CODEBOOK, disk_parts),
        ceiling,
        generation,
        _read_filtered(fields),
        _read_share(fields),
        clusters,
        id_end,
        fields.whole("unmeasured", 0) if "unmeasured" in fields else 0,
        directories=directories,
        lost=frozenset() if clusters is None else _lost(directories, clusters, made, partial),
        border=fields.real("border") if "border" in fields else None,
        built_recall=_read_recall(fields, "built_recall") if "built_recall" in fields else (),
    )


def _read_directories(fields: Fields, clusters: Clusters) -> list[str]:
    """The directories of pages, if these do not lie beside the other files."""
    directories: list[str] = []
    if "directories" in fields:
        directories = fields.texts("directories", count=DIRECTORIES_MAX)
        if not directories or not all(map(os.path.isabs, directories)):
            fields.refuse("directories", "absolute paths", directories)
    named = max(each.directory for each in clusters.page_files)
    if named >= max(1, len(directories)):
        fields.refuse("page_files", f"a directory of a cluster below {len(directories)}", named)
    return directories


def _lost(
    directories: Sequence[str], clusters: Clusters, files: Sequence[Region], partial: bool
) -> frozenset[int]:
    """Which files of pages are not there. Raises FileMissingError for the first of these unless
    `partial` is set and others are there, and they lie in several directories; and for a file of
    another size."""
    lost = set[int]()
    for number, region in enumerate(files):
        try:
            check_file_size(region.path, region.size_bytes, "file of a graph", _REBUILD)
        except (errors.FileMissingError, errors.ReadError) as error:
            lost.add(number)
            if not directories:
                raise
            if not partial or len(lost) == len(files):
                where = directories[clusters.page_files[number].directory]
                raise lost_directory(where) from error
    return frozenset(lost)


def read_graph_manifest(engine: NativeEngine, where: str) -> dict[str, Any]:
    """Reads the manifest of a directory, of either version. Raises as `read_graph`."""
    built_by = "espnx graph build"
    try:
        return read_manifest(engine, where, MAGIC, VERSION, built_by=built_by)
    except errors.FormatError as error:
        if error.got != CLUSTERS_VERSION:
            raise
    fields = read_manifest(engine, where, MAGIC, CLUSTERS_VERSION, built_by=built_by)
    if not isinstance(fields.get("n_clusters"), int):
        raise errors.FormatError(
            "field n_clusters",
            path=os.path.join(where, NAME),
            got=fields.get("n_clusters"),
            expected="a whole number",
            fix=_REBUILD,
        )
    return fields


def _read_clusters(
    engine: NativeEngine,
    where: str,
    generation: int,
    fields: Fields,
    layout: PageLayout,
    n_entries: int,
    sums: Mapping[str, int],
) -> Clusters:
    count = fields.whole("n_clusters", min(1, layout.n), CLUSTERS_MAX)
    sizes = {CLUSTERS: TABLE.itemsize * count, CENTROIDS: 4 * count * layout.dim}
    regions = whole_files(where, generation, sizes)
    for region in regions.values():
        check_file_size(region.path, region.size_bytes, "file of a graph", _REBUILD)
    table = np.frombuffer(read_whole(engine, regions, CLUSTERS, sums), TABLE)
    page_files = _read_page_files(fields, generation)
    centroids = np.frombuffer(read_whole(engine, regions, CENTROIDS, sums), "<f4")
    nodes, entries = (table[name].astype(np.int64) for name in ("nodes", "entries"))
    is_right = (nodes > 0) & (nodes <= N_MAX) & (entries > 0) & (entries <= nodes)
    if count == 1 and not layout.n:  # all that it had was deleted
        is_right = (nodes == 0) & (entries == 0)
    copies = fields.whole("copies", 2, count) if "copies" in fields else 1
    has_all = layout.n <= nodes.sum() <= layout.n * copies
    if not is_right.all() or not has_all or entries.sum() != n_entries:
        raise errors.FormatError(
            "table of clusters",
            path=regions[CLUSTERS].path,
            got=f"{nodes.sum()} nodes, {entries.sum()} entry points",
            expected=f"{layout.n} rows, up to {copies} nodes of each, and {n_entries}",
            fix=_REBUILD,
        )
    if not np.isfinite(centroids).all():
        raise errors.FormatError(
            "centroids of a graph",
            path=regions[CENTROIDS].path,
            got="values that are not finite",
            fix=_REBUILD,
        )
    if layout.codes_in != "inline":
        fields.refuse("inline_pq", f"{layout.max_degree}, as with every graph of clusters")
    files, first = (table[name].astype(np.int64) for name in ("file", "first_page"))
    pages = -(-nodes // layout.nodes_per_page)
    _check_places(regions[CLUSTERS].path, page_files, files, first, pages)
    return Clusters(
        centroids.reshape(count, layout.dim).copy(),
        nodes,
        entries,
        copies,
        files,
        first,
        table["salt"].astype(np.uint64),
        page_files,
    )


def _read_page_files(fields: Fields, generation: int) -> list[PageFile]:
    found = [
        PageFile(
            each.whole("directory", 0, DIRECTORIES_MAX - 1),
            each.whole("generation", 1, generation),
            each.whole("pages", 0, ROWS_MAX),
        )
        for each in fields.each("page_files", count=PAGE_FILES_MAX)
    ]
    if not found or len({(each.directory, each.generation) for each in found}) < len(found):
        fields.refuse("page_files", "one or more, each once")
    return found


def _check_places(
    path: str,
    page_files: Sequence[PageFile],
    files: np.ndarray,
    first: np.ndarray,
    pages: np.ndarray,
) -> None:
    """Raises FormatError for clusters that lie outside of their files, or on one another."""
    sizes = np.array([each.pages for each in page_files])
    room = sizes[np.minimum(files, len(sizes) - 1)]
    is_right = (files < len(sizes)) & (first >= 0) & (first <= room) & (pages <= room - first)
    order = np.lexsort((pages, first, files))
    ends = (first + pages)[order]
    is_same = files[order][1:] == files[order][:-1]
    if not is_right.all() or (is_same & (first[order][1:] < ends[:-1])).any():
        raise errors.FormatError(
            "places of clusters",
            path=path,
            got="pages outside of their file, or of two clusters",
            expected=f"those of {len(sizes)} files, each of one",
            fix=_REBUILD,
        )


def _read_rotated(fields: Fields, *, has_disk_codebook: bool) -> list[str]:
    rotated = fields.texts("rotated", count=2)
    among = [CODEBOOK, DISK_CODEBOOK] if has_disk_codebook else [CODEBOOK]
    if rotated != [name for name in among if name in rotated]:
        fields.refuse("rotated", f"of {', '.join(among)}, each once", rotated)
    return rotated


def _read_parts(fields: Fields, name: str, count: int, dim: int) -> np.ndarray:
    """The begins of the parts of a code of `count` bytes."""
    parts = np.array(fields.wholes(name, 0, dim, count=count + 1), np.int64)
    if len(parts) != count + 1 or parts[0] != 0 or parts[-1] != dim or (np.diff(parts) < 1).any():
        fields.refuse(name, f"{count + 1} growing numbers from 0 to {dim}")
    return parts


def _located(
    source: str | os.PathLike[str] | GraphSections,
    where: str,
    generation: int,
    sizes: Mapping[str, int],
) -> dict[str, Region]:
    """The region of each file, of the size that it must have: checked before memory is taken for
    anything."""
    if not isinstance(source, GraphSections):
        regions = whole_files(where, generation, sizes)
        for region in regions.values():
            check_file_size(region.path, region.size_bytes, "file of a graph", _REBUILD)
        return regions
    regions = {
        name: source.regions[section_of(name)]
        for name in sizes
        if section_of(name) in source.regions
    }
    for name, size_bytes in sizes.items():
        found = regions[name].size_bytes if name in regions else None
        if found != size_bytes:
            raise errors.FormatError(
                f"section {section_of(name)} of a graph",
                path=where,
                got="none" if found is None else f"{found} bytes",
                expected=f"{size_bytes} bytes",
                fix=_REBUILD,
            )
    return regions


def _read_layout(fields: Fields, n_max: int) -> PageLayout:
    max_degree, dim = fields.whole("max_degree", 1, MAX_DEGREE_MAX), fields.whole("dim", 1, DIM_MAX)
    format = fields.choice("format", NODE_FORMATS)  # noqa: A001
    layout = PageLayout(
        fields.whole("n", 0, n_max),
        dim,
        format,
        max_degree,
        fields.whole("code_bytes", 1, DIM_MAX),
        fields.whole("inline_pq", 0, max_degree),
        fields.flag("paged_codes"),
        fields.whole("page_bytes", PAGE_UNIT_BYTES, PAGE_BYTES_MAX),
        fields.whole("disk_pq_bytes", 1, dim) if format == "pq" else 0,
    )
    if layout.codes_in == "inline" and layout.paged_codes:
        fields.refuse("paged_codes", "false where all codes are inline")
    if layout.paged_codes and layout.code_bytes > CODE_PAGE_BYTES - HEADER.itemsize:
        fields.refuse(
            "code_bytes", f"at most {CODE_PAGE_BYTES - HEADER.itemsize}, what a page holds"
        )
    if layout.page_bytes % PAGE_UNIT_BYTES or layout.nodes_per_page < 1:
        fields.refuse("page_bytes", "a multiple of 4096 that holds a node")
    return layout


def _read_id_end(fields: Fields, layout: PageLayout, n_clusters: int | None) -> int | None:
    if "id_end" not in fields:
        return None
    return fields.whole("id_end", layout.n, N_MAX if n_clusters is None else ROWS_MAX)


def _read_share(fields: Fields) -> GraphShare | None:
    if "share" not in fields:
        return None
    share = fields.inner("share")
    count = share.whole("count", 1)
    return GraphShare(
        share.hexadecimal("collection", 32), share.whole("number", most=count - 1), count
    )


def _read_recall(fields: Fields, name: str) -> list[RecallPoint]:
    return [
        RecallPoint(
            each.whole("list_size", 1),
            each.real("recall"),
            each.real("pages"),
            each.real("probe_margin") if "probe_margin" in each else None,
            each.real("clusters") if "clusters" in each else None,
        )
        for each in fields.each(name, count=_CURVE_POINTS_MAX)
        if "clusters" not in each or "probe_margin" in each  # else by another rule
    ]


def _read_filtered(fields: Fields) -> list[FilteredRecall]:
    found = [
        FilteredRecall(each.real("share"), _read_recall(each, "near"), _read_recall(each, "far"))
        for each in fields.each("filtered", count=_CURVE_POINTS_MAX)
    ]
    shares = [each.share for each in found]
    if shares != sorted(shares, reverse=True) or not all(0 < share <= 1 for share in shares):
        fields.refuse("filtered", "shares above 0, at most 1, the largest first", shares)
    return found


def read_whole(
    engine: NativeEngine, regions: Mapping[str, Region], name: str, sums: Mapping[str, int]
) -> bytes:
    """One of a graph's files that are read whole. Raises ChecksumError, and as a read."""
    data = read_region(engine, regions[name]).tobytes()
    if crc32c(data) != sums[name]:
        raise errors.ChecksumError(
            "file of a graph",
            path=regions[name].path,
            offset_bytes=regions[name].offset_bytes,
            got=f"CRC32C {crc32c(data):08x}",
            expected=f"{sums[name]:08x}",
            fix=_REBUILD,
        )
    return data
