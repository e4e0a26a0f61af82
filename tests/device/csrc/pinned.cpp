#include "pinned.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace card {
namespace {

constexpr int PINNED_POISON = 0xFE;
constexpr size_t PAGE = 4096;

void release_range(void* context) {
  if (context) pinned().release(static_cast<char*>(context));
}

bool is_done(const MarkPtr& mark) { return mark->query(); }

}  // namespace

Pinned::Ranges::iterator Pinned::find(const void* address) {
  auto at = const_cast<char*>(static_cast<const char*>(address));
  auto found = ranges_.upper_bound(at);
  if (found == ranges_.begin()) return ranges_.end();
  --found;
  return at < found->first + found->second.nbytes ? found : ranges_.end();
}

at::DataPtr Pinned::allocate(size_t nbytes) {
  touch(current_device());
  std::lock_guard lock(guard_);
  free_unused();
  void* found = nullptr;
  nbytes = std::max<size_t>(nbytes, 1);
  TORCH_CHECK(posix_memalign(&found, PAGE, nbytes) == 0, "card: no pinned memory");
  std::memset(found, PINNED_POISON, nbytes);
  ranges_[static_cast<char*>(found)] = {nbytes, true, {}};
  return {found, found, &release_range, at::kCPU};
}

void Pinned::release(char* address) {
  std::lock_guard lock(guard_);
  auto found = ranges_.find(address);
  leaving_.emplace_back(address, std::move(found->second));
  ranges_.erase(found);
  free_unused();
}

void Pinned::free_unused() {
  auto used = [](auto& entry) {
    auto& [address, range] = entry;
    if (!std::all_of(range.uses.begin(), range.uses.end(), is_done)) return true;
    std::memset(address, PINNED_POISON, range.nbytes);
    std::free(address);
    return false;
  };
  leaving_.erase(std::stable_partition(leaving_.begin(), leaving_.end(), used), leaving_.end());
}

void Pinned::add(uintptr_t address, size_t nbytes) {
  std::lock_guard lock(guard_);
  auto at = reinterpret_cast<char*>(address);
  TORCH_CHECK(find(at) == ranges_.end(), "card: this memory is registered already");
  ranges_[at] = {nbytes, false, {}};
}

void Pinned::remove(uintptr_t address) {
  std::lock_guard lock(guard_);
  auto found = find(reinterpret_cast<char*>(address));
  TORCH_CHECK(found != ranges_.end() && !found->second.is_own, "card: this memory is not registered");
  auto& uses = found->second.uses;
  TORCH_CHECK(std::all_of(uses.begin(), uses.end(), is_done), "card: a copy of this memory is under way");
  ranges_.erase(found);
}

bool Pinned::contains(const void* address) {
  std::lock_guard lock(guard_);
  return find(address) != ranges_.end();
}

void Pinned::use(const void* address, const MarkPtr& mark) {
  std::lock_guard lock(guard_);
  auto found = find(address);
  if (found == ranges_.end()) return;
  auto& uses = found->second.uses;
  uses.erase(std::remove_if(uses.begin(), uses.end(), is_done), uses.end());
  uses.push_back(mark);
}

size_t Pinned::nbytes_added() {
  std::lock_guard lock(guard_);
  size_t total = 0;
  for (auto& [address, range] : ranges_) total += range.is_own ? 0 : range.nbytes;
  return total;
}

c10::DeleterFnPtr Pinned::raw_deleter() const { return &release_range; }

void Pinned::copy_data(void* target, const void* source, std::size_t nbytes) const {
  std::memcpy(target, source, nbytes);
}

bool Pinned::record_event(void* address, void*, c10::Stream stream) {
  use(address, queue(stream.device_index(), stream.id()).mark());
  return true;
}

Pinned& pinned() {
  static auto* pinned = new Pinned();
  return *pinned;
}

namespace {
[[maybe_unused]] const bool pinned_is_set = (at::setHostAllocator(TYPE, &pinned()), true);
}

}  // namespace card
