// Pinned host memory: the allocator's own, and what is registered. Only it is copied while the host goes on.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "streams.h"

namespace card {

class Pinned final : public at::HostAllocator {
 public:
  at::DataPtr allocate(size_t nbytes) override;
  void release(char* address);
  void add(uintptr_t address, size_t nbytes);
  void remove(uintptr_t address);  // raises where a copy of it is under way
  bool contains(const void* address);
  void use(const void* address, const MarkPtr& mark);
  size_t nbytes_added();

  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* target, const void* source, std::size_t nbytes) const override;
  bool record_event(void* address, void* context, c10::Stream stream) override;
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  struct Range {
    size_t nbytes;
    bool is_own;
    std::vector<MarkPtr> uses;
  };
  using Ranges = std::map<char*, Range>;

  Ranges::iterator find(const void* address);
  void free_unused();

  std::mutex guard_;
  Ranges ranges_;
  std::vector<std::pair<char*, Range>> leaving_;
};

Pinned& pinned();

}  // namespace card
