// Pages that a thread has read last, up to a number of them: the least recently used goes first
// (AiSAQ's dynamic cache).
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>

#include "io/buffer.hpp"

namespace espnx::graph {

class PageCache {
 public:
  explicit PageCache(size_t most) : most_(most) {}

  // The page, or null.
  const uint8_t* find(int64_t page) {
    const auto at = places_.find(page);
    if (at == places_.end()) return nullptr;
    pages_.splice(pages_.begin(), pages_, at->second);
    return reinterpret_cast<const uint8_t*>(at->second->buffer->data);
  }

  void keep(int64_t page, std::shared_ptr<io::Buffer> buffer) {
    if (most_ == 0 || places_.count(page)) return;
    if (pages_.size() == most_) {
      places_.erase(pages_.back().page);
      pages_.pop_back();
    }
    pages_.push_front({page, std::move(buffer)});
    places_[page] = pages_.begin();
  }

 private:
  struct Page {
    int64_t page;
    std::shared_ptr<io::Buffer> buffer;
  };

  size_t most_;
  std::list<Page> pages_;  // the one used last in front
  std::unordered_map<int64_t, std::list<Page>::iterator> places_;
};

}  // namespace espnx::graph
