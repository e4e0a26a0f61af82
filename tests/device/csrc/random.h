// Random numbers of the card: those of a generator of the CPU, which operators draw from.
#pragma once

#include <ATen/core/Generator.h>

#include "streams.h"

namespace card {

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device);
  Generator(c10::DeviceIndex device, at::Generator of_cpu);
  static c10::DeviceType device_type() { return TYPE; }

  void set_current_seed(uint64_t seed) override { of_cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { of_cpu.set_offset(offset); }
  uint64_t get_offset() const override { return of_cpu.get_offset(); }
  uint64_t current_seed() const override { return of_cpu.current_seed(); }
  uint64_t seed() override { return of_cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { of_cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return of_cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), of_cpu.clone()); }

  at::Generator of_cpu;
};

const at::Generator& default_generator(int device);

}  // namespace card
