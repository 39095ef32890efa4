// A posting list on storage: which records have a term, and how much of it. The specification is
// docs/postings-format.md.
//
//   list   = layers, one after the other; each orders its postings by record number
//   layer  = pieces of 960 KiB, the last one shorter; each is checked by itself
//   piece  = header, the term (first piece of a list), two bytes of widths for each block, blocks,
//            outliers, zeros
//   block  = 128 postings (the last one of a piece fewer): gaps between record numbers, then
//            values, bit-packed
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace espnx::postings {

constexpr int64_t kBlockPostings = 128;
constexpr int64_t kListAlignBytes = 64;
constexpr int64_t kPieceBytes = 960
                                << 10;  // one request of the engine's own size; a multiple of 4096
constexpr int64_t kSpareBytes =
    8;  // zeros behind the last block: a word may be read that begins in it
constexpr int64_t kMaxTermBytes =
    256;  // of the term in a list; longer ones are there by their digest
constexpr int64_t kMaxRecords = INT32_MAX;  // of a segment

// What a posting carries.
enum class ValueKind : int {
  kCount =
      0,  // how often the record has the term, 1 or more; stored less one, large ones as outliers
  kImpact = 1,  // a byte 1..255 times what a step of the list is worth; stored less one
  kFloat = 2,   // the bits of a float32
};
constexpr int kValueKinds = 3;

enum PieceFlags : uint8_t { kLastPiece = 1, kLastLayer = 2, kTermDigest = 4 };

struct PieceHeader {
  uint32_t crc32c;    // of all that follows in the piece, its zeros included
  uint32_t salt;      // of the segment
  uint32_t term;      // number of the term in its segment
  uint32_t postings;  // in this piece
  uint32_t base;      // record number of the first of them
  uint32_t last;      // and of the last
  uint16_t piece;     // counts within the layer
  uint8_t layer;
  uint8_t flags;
  uint16_t term_bytes;  // that follow the header: in the first piece of a list
  uint16_t outliers;    // {uint32 posting, uint32 value} behind the blocks: values that do not fit
                        // their block's width
};
static_assert(sizeof(PieceHeader) == 32);

struct Outlier {
  uint32_t posting, value;
};

// What is known of a segment before any of its lists is read.
struct ListRules {
  uint32_t salt;
  ValueKind kind;
  int64_t n_records;  // at most kMaxRecords
};

struct Bytes {
  const uint8_t* data;
  int64_t size;
};

// A list in memory.
struct StoredList {
  uint32_t term;
  Bytes bytes;
  int64_t first_layer_bytes;  // 0: the list has one layer
  Bytes name;                 // the term, or its digest; null: whichever it is
  bool is_digest;             // where the term is longer than kMaxTermBytes
};

enum class ListFault : int { kNone = 0, kDamaged, kOtherTerm };

// Looks at everything in a list but the order of its numbers, which the scan looks at. kOtherTerm:
// a whole list, of another term with the same hash. `why` gets a phrase. `is_prefix`: only the
// first layer is there.
ListFault check_list(const StoredList& list, const ListRules& rules, bool is_prefix,
                     const char** why);

// Writes lists. Postings of a list may come in parts, so that none need be in memory whole.
class ListEncoder {
 public:
  ListEncoder(uint32_t salt, ValueKind kind) : salt_(salt), kind_(kind) {}

  // Begins a list; the name is at most kMaxTermBytes long, here as in a StoredList.
  void begin_list(uint32_t term, Bytes name, bool is_digest);
  // Its next postings, ascending in `records` within a layer. Values are counts, impacts, or the
  // bits of floats.
  void add(const uint32_t* records, const uint32_t* values, int64_t n);
  // Returns the bytes of the layer.
  int64_t end_layer(bool is_last);

  // What has been written and not been taken.
  std::vector<uint8_t>& bytes() { return bytes_; }

 private:
  void add_block();
  void end_piece(bool is_last_of_layer, bool is_last_layer);
  int64_t piece_bytes(int64_t more_blocks, int64_t more_bytes, int64_t more_outliers) const;

  uint32_t salt_;
  ValueKind kind_;
  std::vector<uint8_t> bytes_;
  uint32_t term_ = 0;
  std::vector<uint8_t> name_;
  bool is_digest_ = false;
  uint8_t layer_ = 0;
  uint16_t piece_ = 0;
  int64_t layer_bytes_ = 0;
  // The piece that is being filled.
  std::vector<uint16_t> widths_;
  std::vector<uint8_t> packed_;
  std::vector<Outlier> outliers_;
  uint32_t base_ = 0, last_ = 0;
  int64_t piece_postings_ = 0;
  // The block that is being filled.
  uint32_t records_[kBlockPostings], values_[kBlockPostings];
  int64_t filled_ = 0;
};

// The postings of one layer of a checked list, block after block.
class ListReader {
 public:
  ListReader(Bytes layer, const ListRules& rules)
      : kind_(rules.kind), n_records_(rules.n_records), layer_(layer) {}

  // The next block into `records` and `values` [128], values as add() took them. Returns how many;
  // 0: that was all; -1: the numbers are out of order or not of the segment.
  int64_t next(uint32_t* records, uint32_t* values);

 private:
  bool begin_piece();

  ValueKind kind_;
  int64_t n_records_;
  Bytes layer_;
  int64_t at_ = 0;  // in layer_: the next piece
  const uint8_t *widths_ = nullptr, *block_ = nullptr, *outliers_ = nullptr;
  int64_t left_ = 0, posting_ = 0, outliers_left_ = 0;  // of the piece that is being read
  uint32_t next_ = 0;  // the least number that the next posting may have
};

// Its layers: one or two.
std::vector<Bytes> layers_of(const StoredList& list);

}  // namespace espnx::postings
