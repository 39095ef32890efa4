// Pages of nodes, as docs/graph-format.md describes them: a header, and nodes of equal size one
// after the other.
//
//   page   crc32c of what follows: u32 | number of the page: u32 | salt of the graph: u64 | nodes |
//          zeros
//   node   vector, or a code in its place | row of the vector in the input, its lower half: u32 |
//          neighbours: u16 | upper bits of the row: u16 | u32 [R] | codes of the first
//          neighbours, code_bytes each
//
// A file may hold several graphs, parts of one whole: pages and nodes of each have numbers of their
// own, and rows are those of the whole.
//
// and where codes are paged, pages of them: the same header, codes of successive nodes, zeros.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/crc32c.hpp"
#include "cpu/distances/distances.hpp"

namespace espnx::graph {

constexpr int64_t kPageHeaderBytes = 16;
constexpr int64_t kNodeFixedBytes = 8;
constexpr int64_t kCodePageBytes = 4096;

// One of the graphs of a directory.
struct Part {
  int64_t first_page = 0;  // of all pages, one graph after the other
  int64_t n = 0;           // nodes, numbered page by page
  uint64_t salt = 0;
  int64_t first_entry = 0, end_entry = 0;  // among the entry points of all
  int64_t file = 0, file_page = 0;         // where its first page lies: of the view's files
};

struct PageLayout {
  int64_t n = 0;  // rows of the input
  int64_t dim = 0;
  VectorFormat format = VectorFormat::kFp32;
  int64_t degree = 0;        // R
  int64_t code_bytes = 0;    // of one code
  int64_t inline_codes = 0;  // neighbours whose codes a node has: the first so many, 0 to R
  int64_t page_bytes = 0;
  int64_t nodes_per_page = 0;
  bool paged_codes = false;  // codes lie in pages of their own, in a file of their own
  int64_t disk_pq_bytes =
      0;  // of the code that a node has in place of its vector; 0: it has the vector

  int64_t codes_per_page() const { return (kCodePageBytes - kPageHeaderBytes) / code_bytes; }
  int64_t code_page_of(uint32_t node) const { return node / codes_per_page(); }
  int64_t vector_bytes() const {
    return disk_pq_bytes > 0 ? disk_pq_bytes : dim * value_bytes(format);
  }
  int64_t node_bytes() const {
    return vector_bytes() + kNodeFixedBytes + 4 * degree + inline_codes * code_bytes;
  }
  int64_t pages_of(const Part& part) const {
    return (part.n + nodes_per_page - 1) / nodes_per_page;
  }
  int64_t page_of(uint32_t node) const { return node / nodes_per_page; }
  // How many nodes a page of a part has.
  int64_t nodes_of(const Part& part, int64_t page) const {
    const int64_t left = part.n - page * nodes_per_page;
    return left < nodes_per_page ? left : nodes_per_page;
  }
};

inline uint32_t load_u32(const uint8_t* at) {
  uint32_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

inline uint16_t load_u16(const uint8_t* at) {
  uint16_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// A node where it lies.
class NodeView {
 public:
  NodeView(const PageLayout& layout, const uint8_t* page, int64_t place)
      : layout_(layout), at_(page + kPageHeaderBytes + place * layout.node_bytes()) {}

  const uint8_t* vector() const { return at_; }
  int64_t row() const {
    return load_u32(at_ + layout_.vector_bytes()) |
           static_cast<int64_t>(load_u16(at_ + layout_.vector_bytes() + 6)) << 32;
  }
  int64_t n_neighbours() const { return load_u16(at_ + layout_.vector_bytes() + 4); }
  uint32_t neighbour(int64_t i) const {
    return load_u32(at_ + layout_.vector_bytes() + kNodeFixedBytes + 4 * i);
  }
  const uint8_t* code(int64_t i) const {
    return at_ + layout_.vector_bytes() + kNodeFixedBytes + 4 * layout_.degree +
           i * layout_.code_bytes;
  }

 private:
  const PageLayout& layout_;
  const uint8_t* at_;
};

// What is wrong with the header of a page that was read, or null.
inline const char* header_fault(const uint8_t* page, int64_t page_bytes, int64_t number,
                                uint64_t expected_salt) {
  if (crc32c(0, page + 4, page_bytes - 4) != load_u32(page)) return "its checksum does not match";
  uint64_t salt;
  std::memcpy(&salt, page + 8, sizeof(salt));
  if (salt != expected_salt) return "it belongs to another graph";
  if (load_u32(page + 4) != static_cast<uint32_t>(number)) return "it is another page of the graph";
  return nullptr;
}

// What is wrong with a page of nodes of a part, or null.
inline const char* fault_of(const PageLayout& layout, const Part& part, const uint8_t* page,
                            int64_t number) {
  if (const char* fault = header_fault(page, layout.page_bytes, number, part.salt)) return fault;
  for (int64_t i = 0; i < layout.nodes_of(part, number); ++i) {
    const NodeView node(layout, page, i);
    if (node.n_neighbours() > layout.degree || node.row() >= layout.n)
      return "a node's header is out of range";
    for (int64_t j = 0; j < node.n_neighbours(); ++j) {
      if (node.neighbour(j) >= part.n) return "a neighbour is out of range";
    }
  }
  return nullptr;
}

// Of the code pages of a graph, whose numbers have another salt: no page of nodes is taken for one.
inline uint64_t code_salt(const Part& part) { return ~part.salt; }

}  // namespace espnx::graph
