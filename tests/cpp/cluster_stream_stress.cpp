// A stream of clusters that several threads ask, while another forgets tickets and clears the
// stream; built with a sanitizer by tests/device/clusters/test_stress.py.
//
//   cluster_stream_stress SEED ROUNDS FOLDER
//
// Exit code 0: every cluster was handed out once, with the distances and ids of its entries, or its
// ticket was forgotten, or it is the damaged one and was reported so.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "cpu/crc32c.hpp"
#include "device/cluster_stream.hpp"

namespace {

namespace io = espnx::io;
namespace device = espnx::device;
using Random = std::mt19937_64;

constexpr int64_t kDim = 13, kEntry = 4 + kDim, kPage = 4096;
constexpr int kClusters = 300, kDamaged = 77, kThreads = 4;

[[noreturn]] void broken(const std::string& what) {
  std::fprintf(stderr, "cluster_stream_stress: %s\n", what.c_str());
  std::_Exit(3);
}

struct Store {
  std::string path;
  std::vector<uint8_t> data;
  std::vector<int64_t> offset_bytes, n_vectors, crc32c;
};

// Clusters of 0 to 5000 vectors; one of them has another checksum than is asked for.
Store make_store(const std::string& path, Random& random) {
  Store store;
  store.path = path;
  for (int cluster = 0; cluster < kClusters; ++cluster) {
    const auto n = static_cast<int64_t>(random() % (random() % 4 == 0 ? 5000 : 40));
    store.offset_bytes.push_back(static_cast<int64_t>(store.data.size()));
    store.n_vectors.push_back(n);
    for (int64_t byte = 0; byte < n * kEntry; ++byte)
      store.data.push_back(static_cast<uint8_t>(random()));
    store.crc32c.push_back(
        espnx::crc32c(0, store.data.data() + store.offset_bytes.back(), n * kEntry));
    store.data.resize((store.data.size() + kPage - 1) / kPage * kPage);
  }
  store.crc32c[kDamaged] ^= 1;
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  const auto size = static_cast<int64_t>(store.data.size());
  if (fd < 0 || write(fd, store.data.data(), size) != size) broken("cannot make files");
  close(fd);
  return store;
}

struct Asked {
  device::ClusterStream::Ticket ticket;
  std::vector<uint8_t> query;
  std::vector<int64_t> clusters;
  bool has_damaged = false;
};

Asked ask(device::ClusterStream& stream, const Store& store, int64_t file, Random& random) {
  Asked asked;
  for (int k = 0; k < kDim; ++k) asked.query.push_back(static_cast<uint8_t>(random()));
  device::ClusterRequest request{
      {asked.query.data(), kDim, espnx::VectorFormat::kUint8, espnx::Metric::kL2},
      file,
      store.path,
      {},
      {},
      {},
      {},
      60};
  const int count = static_cast<int>(random() % (random() % 3 == 0 ? 200 : 6));
  for (int i = 0; i < count; ++i) {
    const auto cluster = static_cast<int64_t>(random() % kClusters);
    if (cluster == kDamaged && random() % 4 != 0) continue;
    asked.has_damaged |= cluster == kDamaged && store.n_vectors[cluster] > 0;
    asked.clusters.push_back(cluster);
    request.clusters.push_back(cluster);
    request.offset_bytes.push_back(store.offset_bytes[cluster]);
    request.n_vectors.push_back(store.n_vectors[cluster]);
    request.crc32c.push_back(store.crc32c[cluster]);
  }
  asked.ticket = stream.push(std::move(request));
  return asked;
}

void check_reply(const Store& store, const Asked& asked, int64_t item) {
  int64_t at = 0;
  for (int64_t i = 0; i < item; ++i) at += store.n_vectors[asked.clusters[i]];
  const int64_t cluster = asked.clusters[item];
  const auto& replies = device::ClusterStream::replies(*asked.ticket);
  for (int64_t i = 0; i < store.n_vectors[cluster]; ++i) {
    const uint8_t* entry = store.data.data() + store.offset_bytes[cluster] + i * kEntry;
    int32_t id, sum = 0;
    std::memcpy(&id, entry, sizeof(id));
    for (int k = 0; k < kDim; ++k)
      sum += (asked.query[k] - entry[4 + k]) * (asked.query[k] - entry[4 + k]);
    if (replies[at + i].id != id || replies[at + i].distance != static_cast<float>(sum))
      broken("a wrong distance");
  }
}

// False: somebody forgot it, or it is damaged, as it must be.
bool take_whole(device::ClusterStream& stream, const Store& store, const Asked& asked,
                Random& random) {
  std::set<int64_t> seen;
  try {
    for (bool is_last = false; !is_last;) {
      std::vector<int64_t> items;
      is_last = stream.next(*asked.ticket, 1 + static_cast<int64_t>(random() % 40),
                            1 << random() % 24, items);
      for (const int64_t item : items) {
        if (!seen.insert(item).second) broken("a cluster came twice");
        check_reply(store, asked, item);
      }
    }
  } catch (const io::FailureError& error) {
    const bool is_damage = error.failure.kind == io::Kind::checksum && asked.has_damaged;
    if (!is_damage && error.failure.kind != io::Kind::cancelled)
      broken("failed: " + error.failure.what);
    return false;
  }
  if (seen.size() != asked.clusters.size()) broken("clusters are missing");
  if (asked.has_damaged) broken("a damaged cluster has distances");
  return true;
}

void asker(device::ClusterStream& stream, const Store& store, int64_t file, uint64_t seed,
           int rounds, std::atomic<int64_t>& whole, std::atomic<int64_t>& ended) {
  Random random(seed);
  for (int round = 0; round < rounds || whole == 0 || ended == 0; ++round) {
    std::vector<Asked> tickets;
    for (uint64_t i = 0; i < 1 + random() % 4; ++i)
      tickets.push_back(ask(stream, store, file, random));
    for (Asked& asked : tickets) {
      if (random() % 8 == 0) {
        stream.forget(*asked.ticket);
        asked.ticket.reset();
      } else {
        ++(take_whole(stream, store, asked, random) ? whole : ended);
      }
    }
  }
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) broken("cluster_stream_stress SEED ROUNDS FOLDER");
  const uint64_t seed = std::strtoull(words[1], nullptr, 10);
  const int rounds = std::atoi(words[2]);
  Random random(seed);
  const Store store = make_store(words[3] + std::string("/clusters"), random);
  std::atomic<int64_t> whole{0}, ended{0};
  for (const char* path : {"posix", "auto"}) {
    io::EngineOptions options;
    options.path = path;
    options.threads = 3;
    auto engine = std::make_shared<io::Engine>(options);
    const int64_t file = engine->open(store.path, io::Mode::read, io::Direct::automatic);
    // Less than a batch, and then more than all that is asked for at a time.
    device::ClusterStream stream(engine, path == std::string("posix") ? 1 : 64 << 20, 2);
    std::atomic<int> at_work{kThreads};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        asker(stream, store, file, seed * 10 + i, rounds, whole, ended);
        --at_work;
      });
    }
    while (at_work > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(1 << random() % 18));
      stream.stats();
      if (random() % 4 == 0) stream.clear();
    }
    for (std::thread& thread : threads) thread.join();
  }
  std::printf("%lld whole, %lld ended\n", static_cast<long long>(whole),
              static_cast<long long>(ended));
  return 0;
}
