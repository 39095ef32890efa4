// How rows are cut into reads (csrc/device/row_plan.hpp), against the plainest way to say it; built
// and run by tests/device/test_row_plan.py.
//
//   row_plan_check SEED ROUNDS
//
// Exit code 0: in every round each row of each segment lies in one piece, each block is read once
// and checked against its own sum, and no read is longer than allowed.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "device/row_plan.hpp"

namespace {

namespace device = espnx::device;
using Random = std::mt19937_64;
using Place = std::pair<int64_t, int64_t>;  // file, offset

[[noreturn]] void broken(const std::string& what) {
  std::fprintf(stderr, "row_plan_check: %s\n", what.c_str());
  std::_Exit(3);
}

int64_t below(Random& random, int64_t limit) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
}

constexpr size_t kMostSums = 12 * 3 * 4;

// 0, 1, 2, ...: what stands in a place is its number.
const std::array<uint32_t, kMostSums>& numbers() {
  static const auto made = [] {
    std::array<uint32_t, kMostSums> all{};
    std::iota(all.begin(), all.end(), 0);
    return all;
  }();
  return made;
}

struct Case {
  device::RowGeometry geometry;
  std::vector<device::RowSegment> segments;
  std::map<Place, int64_t> sum_of;  // of each block that is there
  int64_t unit_bytes = 0;
};

// Segments that follow one another, with gaps or without, in two files; some are looked at by
// several sequences.
Case random_case(Random& random) {
  Case made;
  made.geometry.block_rows = 1 + below(random, 40);
  made.geometry.block_bytes = 4096 * (1 + below(random, 3));
  made.unit_bytes = 1 + below(random, 10) * (1 + below(random, 6000));
  std::array<int64_t, 2> end{0, 0};
  int64_t sums = 0;
  for (int64_t i = below(random, 12); i > 0; --i) {
    device::RowSegment segment{};
    segment.file = below(random, 2);
    segment.n_heads = below(random, 4);
    segment.n_blocks = below(random, 5);
    segment.first_head = below(random, 3);
    segment.head_step = 1 + below(random, 3);
    segment.sums = numbers().data() + sums;
    if (below(random, 3) == 0) end[segment.file] += made.geometry.block_bytes * below(random, 4);
    segment.offset_bytes = end[segment.file];
    const int64_t blocks = segment.n_heads * segment.n_blocks;
    for (int64_t b = 0; b < blocks; ++b) {
      made.sum_of[{segment.file, segment.offset_bytes + b * made.geometry.block_bytes}] = sums + b;
    }
    sums += blocks;
    end[segment.file] += blocks * made.geometry.block_bytes;
    for (int64_t looks = 1 + below(random, 3); looks > 0; --looks) {
      segment.sequence = static_cast<int64_t>(made.segments.size());
      segment.n_rows = below(random, segment.n_blocks * made.geometry.block_rows + 1);
      segment.first_position = below(random, 1000);
      made.segments.push_back(segment);
    }
  }
  std::shuffle(made.segments.begin(), made.segments.end(), random);
  return made;
}

// (file, block's offset, row in the block, sequence, head, position) of every row that is looked
// at.
using Row = std::array<int64_t, 6>;

std::set<Row> wanted_rows(const Case& made) {
  std::set<Row> found;
  const device::RowGeometry& g = made.geometry;
  for (const device::RowSegment& s : made.segments) {
    for (int64_t head = 0; head < s.n_heads; ++head) {
      for (int64_t row = 0; row < s.n_rows; ++row) {
        const int64_t block = head * s.n_blocks + row / g.block_rows;
        found.insert({s.file, s.offset_bytes + block * g.block_bytes, row % g.block_rows,
                      s.sequence, s.first_head + head * s.head_step, s.first_position + row});
      }
    }
  }
  return found;
}

void check_unit(const Case& made, const device::RowPlan& plan, const device::RowUnit& unit,
                std::set<Place>& read, std::set<Row>& rows) {
  const device::RowGeometry& g = made.geometry;
  const int64_t most = std::max(g.block_bytes, made.unit_bytes);
  if (unit.size_bytes < 1 || unit.size_bytes > most)
    broken("a read of " + std::to_string(unit.size_bytes) + " bytes");
  int64_t end_bytes = 0;
  for (const device::RowSums& sums : plan.sums(unit)) {
    for (const uint32_t number : sums) {
      const Place block{unit.file, unit.offset_bytes + end_bytes};
      end_bytes += g.block_bytes;
      const auto sum = made.sum_of.find(block);
      if (sum == made.sum_of.end()) broken("a block that is nobody's is read");
      if (sum->second != number) broken("a block is checked against another's sum");
      if (!read.insert(block).second) broken("a block is read twice");
    }
  }
  if (unit.size_bytes != end_bytes) broken("sums and blocks differ");
  for (const device::RowPiece& piece : plan.pieces(unit)) {
    if (piece.n_rows < 1) broken("a piece without rows");
    for (int64_t row = 0; row < piece.n_rows; ++row) {
      const int64_t at = piece.offset_bytes + row / g.block_rows * g.block_bytes;
      if (at < 0 || at >= unit.size_bytes) broken("a piece leaves its read");
      const Row found{unit.file,  unit.offset_bytes + at,    row % g.block_rows, piece.sequence,
                      piece.head, piece.first_position + row};
      if (!rows.insert(found).second) broken("a row is seen twice");
    }
  }
}

// The bytes that are read, and how many reads there are.
std::pair<size_t, size_t> check(const Case& made) {
  const auto pool = std::make_shared<espnx::io::BufferPool>(1 << 20, true);
  const device::RowPlan plan =
      device::plan_rows(made.segments, made.geometry, made.unit_bytes, pool);
  const auto& units = plan.units;
  std::set<Place> read, needed;
  std::set<Row> rows;
  Place before{-1, -1};
  for (const device::RowUnit& unit : units) {
    if (Place{unit.file, unit.offset_bytes} <= before)
      broken("reads are not in the order of the file");
    before = {unit.file, unit.offset_bytes + unit.size_bytes - 1};
    check_unit(made, plan, unit, read, rows);
  }
  const std::set<Row> wanted = wanted_rows(made);
  if (rows != wanted) broken("rows are missing, or too many");
  for (const Row& row : wanted) needed.insert({row[0], row[1]});
  if (read != needed) broken("blocks without rows are read");
  const int64_t unit_blocks = std::max<int64_t>(1, made.unit_bytes / made.geometry.block_bytes);
  for (size_t i = 1; i < units.size(); ++i) {
    const device::RowUnit &a = units[i - 1], &b = units[i];
    const bool touch = a.file == b.file && a.offset_bytes + a.size_bytes == b.offset_bytes;
    if (touch && a.size_bytes < unit_blocks * made.geometry.block_bytes)
      broken("a read that could be longer");
  }
  return {read.size(), units.size()};
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) broken("row_plan_check SEED ROUNDS");
  Random random(std::strtoull(words[1], nullptr, 10));
  size_t blocks = 0, units = 0;
  for (int64_t round = std::strtoll(words[2], nullptr, 10); round > 0; --round) {
    const auto [read, cut] = check(random_case(random));
    blocks += read;
    units += cut;
  }
  std::printf("%zu blocks in %zu reads\n", blocks, units);
  return blocks > units && units > 0 ? 0 : 4;
}
