// Streams of several devices that attend, some naming pages on the way, while another thread clears
// them; built with a sanitizer by tests/device/test_row_stream.py.
//
//   row_stream_stress SEED ROUNDS FOLDER
//
// Attention itself is replaced by a sum over the rows, which says whether each of them was seen
// once. Exit code 0: every ticket was attended over wholly or was cancelled, and what is read ahead
// keeps to its window afterwards.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

#include "cpu/crc32c.hpp"
#include "device/draft/page_naming.hpp"
#include "device/row_stream.hpp"

namespace espnx {

void attend(const AttentionQueries&, const AttentionRows& rows, const AttentionState& state,
            const PageSums*) {
  for (int64_t row = 0; row < rows.n_rows; ++row) {
    state.o[0] += static_cast<float>(
        rows.k[row / rows.block_rows * rows.block_stride_bytes + row % rows.block_rows]);
  }
  state.l[0] += static_cast<float>(rows.n_rows);
}

void merge_attention(const AttentionState& into, const AttentionState& from, int64_t, int64_t) {
  into.o[0] += from.o[0];
  into.l[0] += from.l[0];
}

void finish_attention(const AttentionState&, int64_t, int64_t, float*) {}
float attention_mass(const float*, const float*, const float*, int64_t) { return 0; }
int64_t row_item_bytes(RowFormat) { return 1; }

}  // namespace espnx

namespace {

namespace io = espnx::io;
namespace device = espnx::device;
using Random = std::mt19937_64;

constexpr int64_t kBlock = 4096, kBlocks = 48, kUnitBlocks = 2, kWindow = 4 * kUnitBlocks * kBlock;
constexpr int kStreams = 3, kThreads = 3;

[[noreturn]] void broken(const std::string& what) {
  std::fprintf(stderr, "row_stream_stress: %s\n", what.c_str());
  std::_Exit(3);
}

struct Store {
  std::shared_ptr<io::Engine> engine;
  std::unique_ptr<device::RowStream> stream;
  int64_t file;
  std::vector<char> data;
  std::vector<uint32_t> sums;  // of its blocks
};

Store make_store(const std::string& name, const std::string& path, Random& random) {
  Store store;
  store.data.resize(kBlocks * kBlock);
  for (char& byte : store.data) byte = static_cast<char>(random() % 16);
  for (int64_t block = 0; block < kBlocks; ++block) {
    store.sums.push_back(espnx::crc32c(0, store.data.data() + block * kBlock, kBlock));
  }
  const int fd = open(name.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (fd < 0 || write(fd, store.data.data(), store.data.size()) != kBlocks * kBlock)
    broken("cannot make files");
  close(fd);
  io::EngineOptions options;
  options.path = path;
  options.threads = 3;
  store.engine = std::make_shared<io::Engine>(options);
  store.file = store.engine->open(name, io::Mode::read, io::Direct::automatic);
  store.stream = std::make_unique<device::RowStream>(store.engine, kWindow, 60.0);
  return store;
}

// One sequence, one head; every block a byte a row, in reads of two blocks. `expected`: the sum
// over all rows.
device::RowRequest request_of(const Store& store, Random& random, double& expected) {
  device::RowRequest request;
  request.geometry.d = request.geometry.dv = 8;
  request.geometry.is_shared = true;
  request.geometry.block_rows = request.geometry.block_bytes = kBlock;
  const int64_t units = 1 + static_cast<int64_t>(random() % (kBlocks / kUnitBlocks));
  const int64_t blocks = units * kUnitBlocks;
  request.segments.push_back(
      {store.file, 0, 0, 0, 1, 1, blocks, blocks * kBlock, 0, store.sums.data()});
  request.unit_bytes = kUnitBlocks * kBlock;
  expected = 0;
  for (int64_t b = 0; b < blocks * kBlock; ++b) expected += store.data[b];
  return request;
}

// All reads of the ticket in several threads, each of which waits for its turn to offer its pages.
void name_pages(Store& store, int64_t ticket, const device::RowQueries& queries, int threads) {
  device::RowGeometry geometry;
  geometry.d = geometry.dv = 8;
  geometry.is_shared = true;
  geometry.block_rows = geometry.block_bytes = kBlock;
  const int64_t nowhere = -1;
  device::PageNaming naming(queries, geometry, {}, &nowhere, kBlocks * kBlock, threads);
  naming.begin_reads();
  int64_t turns = 0;
  store.stream->visit(
      ticket,
      [&](const device::RowPlan& plan, const device::RowUnit& unit, const char* memory, int thread,
          const std::function<bool()>& is_over) {
        const auto pieces = plan.pieces(unit);
        const int64_t read = &unit - plan.units.data();
        naming.see(pieces.begin(), pieces.count, memory, unit.size_bytes, thread, read, is_over);
        if (read == static_cast<int64_t>(plan.units.size()) - 1) turns = read + 1;
      },
      threads, [] { return false; });
  if (turns == 0) broken("the last read had no turn");
  float lse = 0;
  naming.finish(queries.o, &lse);
}

// False: another thread cleared meanwhile.
bool attend_whole(Store& store, int64_t ticket, double expected, int threads, bool names_pages) {
  std::vector<float> q(8);
  float o[8] = {}, m = 0, l = 0;
  const device::RowQueries queries{q.data(), 1,       1, 1, 8,       8, nullptr, nullptr, nullptr,
                                   0,        nullptr, 0, 0, nullptr, o, &m,      &l};
  try {
    if (names_pages) {
      name_pages(store, ticket, queries, threads);
    } else {
      store.stream->attend(ticket, queries, threads, [] { return false; });
    }
  } catch (const io::FailureError& error) {
    const bool was_gone =
        error.failure.kind == io::Kind::invalid && store.stream->front() != ticket;
    if (error.failure.kind != io::Kind::cancelled && !was_gone)
      broken("failed: " + error.failure.what);
    return false;
  }
  if (o[0] != static_cast<float>(expected)) broken("rows were missed, or seen twice");
  return true;
}

void attender(Store& store, uint64_t seed, int rounds, std::atomic<int64_t>& whole,
              std::atomic<int64_t>& cleared) {
  Random random(seed);
  for (int round = 0; round < rounds || whole == 0 || cleared == 0; ++round) {
    std::vector<std::pair<int64_t, double>> tickets(1 + random() % 4);
    for (auto& [ticket, expected] : tickets)
      ticket = store.stream->push(request_of(store, random, expected));
    for (const auto& [ticket, expected] : tickets) {
      const bool is_whole = attend_whole(
          store, ticket, expected, 1 + static_cast<int>(random() % kThreads), random() % 2 == 0);
      ++(is_whole ? whole : cleared);
      if (!is_whole) break;
    }
    store.stream->clear();
  }
}

// What is read ahead with nobody taking it: exactly the window, whatever came before.
void check_window(Store& store, Random& random) {
  const int64_t before = store.engine->stats().bytes_asked;
  double expected = 0;
  for (int i = 0; i < 4; ++i) {
    device::RowRequest request = request_of(store, random, expected);
    while (request.segments[0].n_blocks < kBlocks) request = request_of(store, random, expected);
    store.stream->push(std::move(request));
  }
  const int64_t ahead = store.engine->stats().bytes_asked - before;
  if (ahead != kWindow) broken("read ahead " + std::to_string(ahead) + " bytes");
  store.stream->clear();
  const int64_t ticket = store.stream->push(request_of(store, random, expected));
  if (!attend_whole(store, ticket, expected, kThreads, true))
    broken("a ticket that nobody cleared was cancelled");
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) broken("row_stream_stress SEED ROUNDS FOLDER");
  const uint64_t seed = std::strtoull(words[1], nullptr, 10);
  const int rounds = std::atoi(words[2]);
  Random random(seed);
  std::vector<Store> stores;
  for (int i = 0; i < kStreams; ++i) {
    stores.push_back(
        make_store(words[3] + ("/rows" + std::to_string(i)), i == 0 ? "posix" : "auto", random));
  }
  std::atomic<int64_t> whole{0}, cleared{0};
  std::atomic<int> at_work{kStreams};
  std::vector<std::thread> threads;
  for (int i = 0; i < kStreams; ++i) {
    threads.emplace_back([&, i] {
      attender(stores[i], seed * 10 + i, rounds, whole, cleared);
      --at_work;
    });
  }
  while (at_work > 0) {  // somebody else, as Ctrl-C does
    std::this_thread::sleep_for(std::chrono::microseconds(
        1 << random() % 17));  // shorter and longer than a read on any machine
    for (Store& store : stores) {
      store.stream->front();
      store.stream->stats();
      store.stream->reach(kWindow * static_cast<int64_t>(random() % 5));
      store.stream->clear();
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (Store& store : stores) {
    store.stream->reach(0);
    check_window(store, random);
  }
  std::printf("%lld whole, %lld cleared\n", static_cast<long long>(whole),
              static_cast<long long>(cleared));
  return 0;
}
