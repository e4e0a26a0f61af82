// Memory of the card, and its allocator: a range of addresses for each stream, which grows and shrinks.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "streams.h"

namespace card {

// The bytes of an address of the device. The address itself faults: the host cannot read it.
char* bytes_at(const void* address);

// Where free bytes are: they join with their neighbours.
class Free {
 public:
  void add(size_t offset, size_t nbytes);
  bool take(size_t nbytes, size_t& offset);  // from the smallest that is large enough
  size_t take_end(size_t end);               // the bytes that reach up to `end`
  std::map<size_t, size_t> take_all();

 private:
  std::map<size_t, size_t> sizes_;  // by offset
};

class Memory final : public c10::DeviceAllocator {
 public:
  Memory();
  c10::DataPtr allocate(size_t nbytes) override;
  void release(void* address);
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
  void set_limit(int device, size_t nbytes);

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* target, const void* source, std::size_t nbytes) const override;
  bool initialized() override { return true; }

 private:
  struct Block {
    size_t nbytes;
    std::set<c10::StreamId> used_on;  // other streams than its own
  };
  struct Range {  // of one stream
    size_t end = 0;
    Free cached, unmapped;  // below the end
  };
  struct Counts {
    size_t limit, allocated = 0, reserved = 0, peak_allocated = 0, peak_reserved = 0;
    int64_t retries = 0, failures = 0;
  };
  using Leaving = std::pair<void*, std::vector<MarkPtr>>;

  bool place(int device, c10::StreamId stream, size_t nbytes, size_t& offset);
  bool reserve(int device, size_t nbytes);
  void reclaim(bool wait);
  void cache(void* address, size_t nbytes);
  void unmap(int device);

  std::mutex guard_;
  std::array<Counts, NUM_DEVICES> counts_;
  std::array<std::array<Range, NUM_STREAMS>, NUM_DEVICES> ranges_;
  std::unordered_map<void*, Block> live_;
  std::vector<std::pair<Leaving, size_t>> leaving_;  // freed, and other streams may still use it
};

Memory& memory();

}  // namespace card
