// The card for torch (its hooks) and for Python (what tests ask of it).
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <cstring>

#include "memory.h"
#include "operators.h"
#include "pinned.h"
#include "random.h"

namespace card {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return available(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return available() ? NUM_DEVICES : 0; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = current_device();
    if (device != before) set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device = -1) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  bool isPinnedPtr(const void* address) const override { return pinned().contains(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = memory().allocate(nbytes);
    if (auto kept = std::min(nbytes, storage.nbytes())) {
      current_queue(storage.device().index()).drain();
      std::memcpy(bytes_at(fresh.get()), bytes_at(storage.data()), kept);
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

[[maybe_unused]] const bool hooks_are_set = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

}  // namespace
}  // namespace card

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace card;
  namespace py = pybind11;
  module.def("set_available", &set_available);
  module.def("available", &available);
  module.def("device_count", [] { return NUM_DEVICES; });
  module.def("current_device", &current_device);
  module.def("set_device", &set_device);
  module.def("generator", [](int device) { return default_generator(device); });
  module.def("register", [](uintptr_t address, size_t nbytes) { pinned().add(address, nbytes); });
  module.def("unregister", [](uintptr_t address) { pinned().remove(address); });
  module.def("registered_nbytes", [] { return pinned().nbytes_added(); });
  module.def("set_limit", [](int device, size_t nbytes) { memory().set_limit(device, nbytes); });
  module.def("set_copy_delay", &set_copy_delay);
  module.def("set_operator_delay", &set_operator_delay);
  module.def("take_touches", &take_touches);
  module.def("counts", [] {
    auto found = counts();
    return std::make_tuple(found.asynchronous, found.synchronous, found.operators);
  });
  module.def("sleep", [](int device, double seconds) {
    current_queue(device).push([seconds] { usleep(static_cast<useconds_t>(seconds * 1e6)); });
  });
  module.def("host_view", &as_host);  // of now, whatever its stream has still to do
  // A kernel on the current stream that ends when somebody says so, as one that waits for other ranks.
  py::class_<Mark, MarkPtr>(module, "Promise").def("keep", &Mark::set);
  module.def("promise", [](int device) {
    auto mark = std::make_shared<Mark>();
    current_queue(device).push([mark] { mark->wait(); });
    return mark;
  });
}
