#include "random.h"

#include <ATen/CPUGeneratorImpl.h>

#include <vector>

namespace card {

Generator::Generator(c10::DeviceIndex device) : Generator(device, at::detail::createCPUGenerator()) {}

Generator::Generator(c10::DeviceIndex device, at::Generator of_cpu)
    : GeneratorImpl(c10::Device(TYPE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      of_cpu(std::move(of_cpu)) {}

const at::Generator& default_generator(int device) {
  static const auto* generators = [] {
    auto* made = new std::vector<at::Generator>();
    for (int index = 0; index < NUM_DEVICES; index++) made->push_back(at::make_generator<Generator>(index));
    return made;
  }();
  return generators->at(device < 0 ? current_device() : device);
}

}  // namespace card
