// See page_naming.hpp.
#include "page_naming.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "cpu/formats/half.hpp"
#include "cpu/formats/scale.hpp"

namespace espnx::device {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
// What pages weigh that are none: a slot without a page gives way to any page.
constexpr float kEmpty = -1.0F, kAlways = std::numeric_limits<float>::infinity();
constexpr int64_t kLastPages = 2;                   // of the text, which stay whatever they weigh
constexpr std::chrono::milliseconds kAskAgain{50};  // whether it is over

io::FailureError unfit(const std::string& what) {
  io::Failure failure;
  failure.kind = io::Kind::invalid;
  failure.what = what;
  return io::FailureError(failure);
}

float log_add(float a, float b) {
  const float most = std::max(a, b);
  if (most == kNone || std::isnan(a) || std::isnan(b)) return a + b;
  return most + std::log1p(std::exp(std::min(a, b) - most));
}

float number(float mass) { return std::isnan(mass) ? 0.0F : mass; }

void write(RowFormat format, uint8_t* out, int64_t i, float value) {
  if (format == RowFormat::fp32) {
    std::memcpy(out + 4 * i, &value, sizeof(value));
    return;
  }
  const uint16_t half = format == RowFormat::fp16 ? float_to_half(value) : float_to_bf16(value);
  std::memcpy(out + 2 * i, &half, sizeof(half));
}

}  // namespace

// Rows of one (sequence, head), with what their pages weigh.
struct PageNaming::Piece {
  AttentionRows rows;
  int64_t sequence;
  int64_t first_page, n_pages;
  const float *sum, *base;  // [pages, n]

  // The rows of page `page` of the piece.
  int64_t begin(int64_t page) const {
    return std::max<int64_t>(0, (first_page + page) * kPageRows - rows.first_position);
  }
  int64_t stop(int64_t page) const {
    return std::min(rows.n_rows, (first_page + page + 1) * kPageRows - rows.first_position);
  }
};

// The slots of one (sequence, head).
struct PageNaming::Slot {
  uint8_t *k, *v, *seen;
  float* lse;
  uint8_t* stays;
  int64_t* number;
  const float* total;
};

PageNaming::PageNaming(const RowQueries& queries, const RowGeometry& geometry,
                       const PageSlots& slots, const int64_t* place, int64_t end, int n_threads)
    : queries_(queries),
      geometry_(geometry),
      slots_(slots),
      place_(place, place + queries.n_sequences),
      end_(end),
      total_(queries.n_sequences * queries.n_heads * queries.n, kNone),
      own_(std::max(1, n_threads)) {
  for (int64_t s = 0; s < queries.n_sequences; ++s) begins_.push_back(begins(s));
}

bool PageNaming::is_seen(int64_t sequence, int64_t position) const {
  return (queries_.first_visible == nullptr || position >= queries_.first_visible[sequence]) &&
         (queries_.visible == nullptr ||
          queries_.visible[sequence * queries_.visible_stride + position] != 0);
}

int64_t PageNaming::begins(int64_t sequence) const {
  int64_t position = 0;
  while (position < end_ && !is_seen(sequence, position)) ++position;
  return position / kPageRows;
}

void PageNaming::check(const RowPiece& piece, int64_t memory_bytes) const {
  const int64_t blocks = (piece.n_rows + geometry_.block_rows - 1) / geometry_.block_rows;
  const bool fits = piece.sequence >= 0 && piece.sequence < queries_.n_sequences &&
                    piece.head >= 0 && piece.head < queries_.n_heads && piece.n_rows >= 0 &&
                    piece.first_position >= 0 && piece.first_position + piece.n_rows <= end_ &&
                    piece.offset_bytes >= 0 && piece.offset_bytes <= memory_bytes &&
                    blocks <= (memory_bytes - piece.offset_bytes) / geometry_.block_bytes;
  if (!fits)
    throw unfit("the queries do not fit the rows: sequences, heads, positions, or their memory");
}

void PageNaming::begin_reads() {
  std::lock_guard lock(mutex_);
  turn_ = 0;
}

void PageNaming::see(const RowPiece* pieces, int64_t count, const char* memory,
                     int64_t memory_bytes, int thread, int64_t read,
                     const std::function<bool()>& is_over) {
  if (thread < 0 || thread >= n_threads()) throw unfit("no such thread");
  Own& own = own_[thread];
  const int64_t n = queries_.n, groups = queries_.n_sequences * queries_.n_heads;
  if (own.m.empty()) {
    own.o.assign(groups * n * queries_.dv, 0.0F);
    own.m.assign(groups * n, kNone);
    own.l.assign(groups * n, 0.0F);
    own.part_o.resize(n * queries_.dv);
  }
  int64_t n_pages = 0;
  for (int64_t i = 0; i < count; ++i) {
    check(pieces[i], memory_bytes);
    n_pages += pages_touched(pieces[i].first_position, pieces[i].n_rows, kPageRows);
  }
  own.part_m.assign(count * n, kNone);
  own.part_l.assign(count * n, 0.0F);
  own.sum.assign(n_pages * n, 0.0F);
  own.base.assign(n_pages * n, 0.0F);
  const auto each = [&](const auto& work) {
    int64_t page = 0;
    for (int64_t i = 0; i < count; ++i) {
      const RowPiece& piece = pieces[i];
      const PageSums pages{kPageRows, own.sum.data() + page * n, own.base.data() + page * n};
      page += pages_touched(piece.first_position, piece.n_rows, kPageRows);
      const AttentionState part{own.part_o.data(), own.part_m.data() + i * n,
                                own.part_l.data() + i * n};
      if (piece.n_rows > 0 && n > 0) work(piece, rows_of(geometry_, piece, memory), part, pages);
    }
  };
  each([&](const RowPiece& piece, const AttentionRows& rows, const AttentionState& part,
           const PageSums& pages) { attend(piece, rows, part, pages, own); });
  if (!wait_for_turn(read, is_over)) return;
  {
    std::lock_guard lock(mutex_);
    each([&](const RowPiece& piece, const AttentionRows& rows, const AttentionState& part,
             const PageSums& pages) { name(piece, rows, part, pages); });
    if (read >= 0) turn_ = read + 1;
  }
  advanced_.notify_all();
}

// Attends to a piece by itself, so that what its pages weigh is known beside one another.
void PageNaming::attend(const RowPiece& piece, const AttentionRows& rows,
                        const AttentionState& part, const PageSums& pages, Own& own) const {
  std::fill(own.part_o.begin(), own.part_o.end(), 0.0F);
  attend_group(queries_, piece.sequence, piece.head, rows, part, &pages);
  merge_attention(state_of_group(queries_, {own.o.data(), own.m.data(), own.l.data()},
                                 piece.sequence, piece.head),
                  part, queries_.n, queries_.dv);
}

// False where it is over before.
bool PageNaming::wait_for_turn(int64_t read, const std::function<bool()>& is_over) {
  std::unique_lock lock(mutex_);
  while (read >= 0 && turn_ != read) {
    advanced_.wait_for(lock, kAskAgain);
    if (turn_ == read || !is_over) continue;
    lock.unlock();  // it may wait for the GIL
    if (is_over()) return false;
    lock.lock();
  }
  return true;
}

// Offers the pages of a piece.
void PageNaming::name(const RowPiece& piece, const AttentionRows& rows, const AttentionState& part,
                      const PageSums& pages) {
  const int64_t place = place_[piece.sequence], n = queries_.n;
  if (place < 0 || slots_.slots == 0) return;
  const int64_t first = (place * queries_.n_heads + piece.head) * slots_.slots;
  const int64_t item = row_item_bytes(slots_.format);
  float* total = total_.data() + (piece.sequence * queries_.n_heads + piece.head) * n;
  for (int64_t i = 0; i < n; ++i) {
    total[i] = log_add(total[i], part.l[i] == 0.0F ? kNone : part.m[i] + std::log(part.l[i]));
  }
  offer({rows, piece.sequence, piece.first_position / kPageRows,
         pages_touched(piece.first_position, piece.n_rows, kPageRows), pages.sum, pages.base},
        {slots_.k + first * kPageRows * queries_.d * item,
         slots_.v + first * kPageRows * queries_.dv * item, slots_.seen + first * kPageRows,
         slots_.lse + first * n, slots_.stays + first, slots_.number + first, total});
}

// Pages of the piece that weigh more than pages in the slots take their place.
void PageNaming::offer(const Piece& piece, const Slot& slot) {
  struct Weighed {
    float mass;
    int64_t at;
    bool stays;
  };
  const int64_t n = queries_.n;
  std::vector<Weighed> offered, kept;
  for (int64_t page = 0; page < piece.n_pages; ++page) {
    const int64_t number_of = piece.first_page + page;
    if (piece.stop(page) - piece.begin(page) < kPageRows) {  // others of it may be there
      const int64_t at =
          std::find(slot.number, slot.number + slots_.slots, number_of) - slot.number;
      if (at < slots_.slots) {
        put(piece, page, slot, at, false);
        continue;
      }
    }
    const float* sum = piece.sum + page * n;
    if (std::all_of(sum, sum + n, [](float each) { return each == 0.0F; })) continue;
    const bool stays =
        number_of == begins_[piece.sequence] || (number_of + kLastPages) * kPageRows >= end_;
    const float mass =
        stays ? kAlways : number(attention_mass(sum, piece.base + page * n, slot.total, n));
    offered.push_back({mass, page, stays});
  }
  if (offered.empty()) return;
  for (int64_t at = 0; at < slots_.slots; ++at) {
    const float mass = slot.number[at] < 0 ? kEmpty
                       : slot.stays[at] != 0
                           ? kAlways
                           : number(attention_mass(nullptr, slot.lse + at * n, slot.total, n));
    kept.push_back({mass, at, false});
  }
  const auto heavier = [](const Weighed& a, const Weighed& b) { return a.mass > b.mass; };
  const auto lighter = [](const Weighed& a, const Weighed& b) { return a.mass < b.mass; };
  std::stable_sort(offered.begin(), offered.end(), heavier);
  std::stable_sort(kept.begin(), kept.end(), lighter);
  for (size_t i = 0; i < std::min(offered.size(), kept.size()); ++i) {
    if (!(offered[i].mass > kept[i].mass)) break;
    const int64_t at = kept[i].at;
    slot.number[at] = piece.first_page + offered[i].at;
    slot.stays[at] = offered[i].stays ? 1 : 0;
    put(piece, offered[i].at, slot, at, true);
  }
}

// Puts the rows of a page that the piece has into a slot: in place of others, or beside them.
void PageNaming::put(const Piece& piece, int64_t page, const Slot& slot, int64_t at,
                     bool is_new) const {
  const int64_t n = queries_.n, item = row_item_bytes(slots_.format);
  const int64_t k_bytes = queries_.d * item, v_bytes = queries_.dv * item;
  uint8_t* k = slot.k + at * kPageRows * k_bytes;
  uint8_t* v = slot.v + at * kPageRows * v_bytes;
  uint8_t* seen = slot.seen + at * kPageRows;
  if (is_new) {
    std::fill_n(seen, kPageRows, uint8_t{0});
    if (piece.stop(page) - piece.begin(page) < kPageRows) {
      std::fill_n(k, kPageRows * k_bytes, uint8_t{0});
      std::fill_n(v, kPageRows * v_bytes, uint8_t{0});
    }
  }
  for (int64_t row = piece.begin(page); row < piece.stop(page); ++row) {
    const int64_t position = piece.rows.first_position + row, in_page = position % kPageRows;
    copy(piece, row, k + in_page * k_bytes, v + in_page * v_bytes);
    seen[in_page] = is_seen(piece.sequence, position) ? 1 : 0;
  }
  float* lse = slot.lse + at * n;
  for (int64_t i = 0; i < n; ++i) {
    const float sum = piece.sum[page * n + i];
    const float own = sum == 0.0F ? kNone : piece.base[page * n + i] + std::log(sum);
    lse[i] = is_new ? own : log_add(lse[i], own);
  }
}

void PageNaming::copy(const Piece& piece, int64_t row, uint8_t* k, uint8_t* v) const {
  const AttentionRows& rows = piece.rows;
  const int64_t item = row_item_bytes(rows.format), in_block = row % rows.block_rows;
  const int64_t block = row / rows.block_rows * rows.block_stride_bytes;
  const uint8_t* from_k = rows.k + block + in_block * queries_.d * item;
  const uint8_t* from_v = rows.v + block + in_block * queries_.dv * item;
  if (rows.format == slots_.format) {
    std::memcpy(k, from_k, queries_.d * item);
    std::memcpy(v, from_v, queries_.dv * item);
    return;
  }
  // int8: K's scales are of channels, V's of rows
  const uint8_t* k_scales = rows.k + block + rows.k_scale_offset_bytes;
  const float scale = scale_at(rows.k + block + rows.v_scale_offset_bytes, in_block);
  for (int64_t i = 0; i < queries_.d; ++i) {
    const auto code = static_cast<float>(static_cast<int8_t>(from_k[i]));
    write(slots_.format, k, i, code * scale_at(k_scales, i));
  }
  for (int64_t i = 0; i < queries_.dv; ++i) {
    const auto code = static_cast<float>(static_cast<int8_t>(from_v[i]));
    write(slots_.format, v, i, code * scale);
  }
}

void PageNaming::finish(float* o, float* lse) {
  const int64_t n = queries_.n, groups = queries_.n_sequences * queries_.n_heads;
  std::vector<float> m(groups * n, kNone), l(groups * n, 0.0F);
  std::fill_n(o, groups * n * queries_.dv, 0.0F);
  const AttentionState all{o, m.data(), l.data()};
  for (Own& own : own_) {
    if (!own.m.empty())
      merge_attention(all, {own.o.data(), own.m.data(), own.l.data()}, groups * n, queries_.dv);
  }
  finish_attention(all, groups * n, queries_.dv, lse);
}

}  // namespace espnx::device
