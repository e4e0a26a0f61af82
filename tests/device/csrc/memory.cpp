#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace card {
namespace {

constexpr size_t ROUND = 512;                // bytes, as CUDA's allocator
constexpr size_t RANGE = size_t(16) << 30;   // addresses of one stream
constexpr size_t SPACE = RANGE * NUM_STREAMS * NUM_DEVICES;
constexpr int POISON = 0xFF;                 // not a number in any type

// Two stretches of addresses of one size: the first is what tensors have, and nothing may touch it; bytes of the
// second appear where they are written.
struct Space {
  char *device, *host;
  Space() : device(reserved(PROT_NONE)), host(reserved(PROT_READ | PROT_WRITE)) {}
  static char* reserved(int protection) {
    void* found = mmap(nullptr, SPACE, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "card: no room for its addresses");
    madvise(found, SPACE, MADV_DONTFORK);
    madvise(found, SPACE, MADV_DONTDUMP);
    return static_cast<char*>(found);
  }
};

const Space& space() {
  static Space space;
  return space;
}

struct Position {
  int device;
  c10::StreamId stream;
  size_t offset;
};

char* address_of(const Position& at) {
  return space().device + (size_t(at.device) * NUM_STREAMS + at.stream) * RANGE + at.offset;
}

Position position_of(const void* address) {
  size_t offset = static_cast<const char*>(address) - space().device;
  TORCH_CHECK(offset < SPACE, "card: an address of other memory");
  size_t range = offset / RANGE;
  return {int(range / NUM_STREAMS), c10::StreamId(range % NUM_STREAMS), offset % RANGE};
}

void release_block(void* address) {
  if (address) memory().release(address);
}

}  // namespace

char* bytes_at(const void* address) {
  if (!address) return nullptr;
  position_of(address);
  return space().host + (static_cast<const char*>(address) - space().device);
}

// Free memory ---------------------------------------------------------------------------------------------------------

void Free::add(size_t offset, size_t nbytes) {
  auto next = sizes_.lower_bound(offset);
  if (next != sizes_.end() && next->first == offset + nbytes) {
    nbytes += next->second;
    next = sizes_.erase(next);
  }
  if (next != sizes_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += nbytes;
      return;
    }
  }
  sizes_[offset] = nbytes;
}

bool Free::take(size_t nbytes, size_t& offset) {
  auto best = sizes_.end();
  for (auto it = sizes_.begin(); it != sizes_.end(); ++it)
    if (it->second >= nbytes && (best == sizes_.end() || it->second < best->second)) best = it;
  if (best == sizes_.end()) return false;
  auto [at, size] = *best;
  sizes_.erase(best);
  if (size > nbytes) sizes_[at + nbytes] = size - nbytes;
  offset = at;
  return true;
}

size_t Free::take_end(size_t end) {
  if (sizes_.empty()) return 0;
  auto last = std::prev(sizes_.end());
  auto [offset, size] = *last;
  if (offset + size != end) return 0;
  sizes_.erase(last);
  return size;
}

std::map<size_t, size_t> Free::take_all() { return std::exchange(sizes_, {}); }

// The allocator -------------------------------------------------------------------------------------------------------

Memory::Memory() {
  for (auto& count : counts_) count.limit = size_t(4) << 30;
}

c10::DataPtr Memory::allocate(size_t nbytes) {
  int device = current_device();
  c10::Device owner(TYPE, device);
  if (!nbytes) return {nullptr, nullptr, &release_block, owner};
  touch(device);
  size_t size = (nbytes + ROUND - 1) / ROUND * ROUND, offset = 0;
  auto stream = current_stream(device);
  std::lock_guard lock(guard_);
  auto& count = counts_[device];
  reclaim(false);
  if (!place(device, stream, size, offset)) {
    count.retries++;
    unmap(device);
    if (!place(device, stream, size, offset)) {
      reclaim(true);
      unmap(device);
      if (!place(device, stream, size, offset)) {
        count.failures++;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "card out of memory. Tried to allocate ", nbytes, " bytes. Device ",
                         device, " has ", count.limit, " bytes, of which ", count.allocated, " are in use.");
      }
    }
  }
  count.allocated += size;
  count.peak_allocated = std::max(count.peak_allocated, count.allocated);
  void* address = address_of({device, stream, offset});
  live_[address] = Block{size, {}};
  return {address, address, &release_block, owner};
}

// Whether there is room in a stream's range: where it is cached, where it was given back, or behind the end.
bool Memory::place(int device, c10::StreamId stream, size_t nbytes, size_t& offset) {
  auto& range = ranges_[device][stream];
  if (range.cached.take(nbytes, offset)) return true;
  if (counts_[device].reserved + nbytes <= counts_[device].limit && range.unmapped.take(nbytes, offset))
    return reserve(device, nbytes);
  size_t there = range.cached.take_end(range.end);
  if (!reserve(device, nbytes - there)) {
    if (there) range.cached.add(range.end - there, there);
    return false;
  }
  offset = range.end - there;
  range.end = offset + nbytes;
  TORCH_CHECK(range.end <= RANGE, "card: a stream has no addresses left");
  std::memset(bytes_at(address_of({device, stream, offset + there})), POISON, nbytes - there);
  return true;
}

bool Memory::reserve(int device, size_t nbytes) {
  auto& count = counts_[device];
  if (count.reserved + nbytes > count.limit) return false;
  count.reserved += nbytes;
  count.peak_reserved = std::max(count.peak_reserved, count.reserved);
  return true;
}

void Memory::release(void* address) {
  std::lock_guard lock(guard_);
  auto found = live_.find(address);
  TORCH_CHECK(found != live_.end(), "card: memory is freed that was not taken");
  Block block = std::move(found->second);
  live_.erase(found);
  int device = position_of(address).device;
  counts_[device].allocated -= block.nbytes;
  if (block.used_on.empty()) return cache(address, block.nbytes);
  std::vector<MarkPtr> marks;
  for (auto stream : block.used_on) marks.push_back(queue(device, stream).mark());
  leaving_.push_back({{address, std::move(marks)}, block.nbytes});
}

// Poisoned in the order of its own stream, on which it may be lent again at once.
void Memory::cache(void* address, size_t nbytes) {
  auto [device, stream, offset] = position_of(address);
  queue(device, stream).push([bytes = bytes_at(address), nbytes] { std::memset(bytes, POISON, nbytes); });
  ranges_[device][stream].cached.add(offset, nbytes);
}

void Memory::reclaim(bool wait) {
  auto used = [&](auto& entry) {
    auto& [address, marks] = entry.first;
    for (auto& mark : marks) {
      if (wait) mark->wait();
      if (!mark->query()) return true;
    }
    cache(address, entry.second);
    return false;
  };
  leaving_.erase(std::stable_partition(leaving_.begin(), leaving_.end(), used), leaving_.end());
}

void Memory::unmap(int device) {
  for (int stream = 0; stream < NUM_STREAMS; stream++) {
    auto& range = ranges_[device][stream];
    auto all = range.cached.take_all();
    if (all.empty()) continue;
    queue(device, stream).drain();  // its poison
    for (auto [offset, nbytes] : all) {
      counts_[device].reserved -= nbytes;
      range.unmapped.add(offset, nbytes);
    }
    range.end -= range.unmapped.take_end(range.end);
  }
}

void Memory::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  std::lock_guard lock(guard_);
  auto found = live_.find(pointer.get());
  if (found == live_.end()) return;
  auto at = position_of(pointer.get());
  if (at.device == stream.device_index() && at.stream != stream.id()) found->second.used_on.insert(stream.id());
}

void Memory::emptyCache(c10::MempoolId_t) {
  std::lock_guard lock(guard_);
  reclaim(true);
  for (int device = 0; device < NUM_DEVICES; device++) unmap(device);
}

void Memory::set_limit(int device, size_t nbytes) {
  std::lock_guard lock(guard_);
  counts_.at(device).limit = nbytes;
}

c10::CachingDeviceAllocator::DeviceStats Memory::getDeviceStats(c10::DeviceIndex device) {
  std::lock_guard lock(guard_);
  const auto& count = counts_.at(device);
  c10::CachingDeviceAllocator::DeviceStats stats;
  auto &allocated = stats.allocated_bytes[0], &reserved = stats.reserved_bytes[0];
  allocated.current = count.allocated;
  allocated.peak = count.peak_allocated;
  reserved.current = count.reserved;
  reserved.peak = count.peak_reserved;
  stats.num_alloc_retries = count.retries;
  stats.num_ooms = count.failures;
  return stats;
}

std::pair<size_t, size_t> Memory::getMemoryInfo(c10::DeviceIndex device) {  // the driver's: it sees what is reserved
  std::lock_guard lock(guard_);
  const auto& count = counts_.at(device);
  return {count.limit - std::min(count.limit, count.reserved), count.limit};
}

void Memory::resetPeakStats(c10::DeviceIndex device) {
  std::lock_guard lock(guard_);
  auto& count = counts_.at(device);
  count.peak_allocated = count.allocated;
  count.peak_reserved = count.reserved;
  count.retries = count.failures = 0;
}

c10::DeleterFnPtr Memory::raw_deleter() const { return &release_block; }

void Memory::copy_data(void* target, const void* source, std::size_t nbytes) const {
  std::memcpy(bytes_at(target), bytes_at(source), nbytes);
}

Memory& memory() {
  static auto* memory = new Memory();
  return *memory;
}

namespace {
[[maybe_unused]] const bool memory_is_set = (c10::SetAllocator(TYPE, &memory()), true);
}

}  // namespace card
