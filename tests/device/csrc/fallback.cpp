// Every other operator: the CPU's, on the bytes of the card, once all before it on the current stream is done.
//
// [1] Tensors of the card become tensors of the CPU with the same bytes; what is written may have no size yet.
// [2] Generators are replaced by the CPU's inside them; an operator that names none draws from the card's as well.
// [3] What comes back is the argument itself, a view of an argument, or is moved to memory of the card.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <unordered_set>

#include "memory.h"
#include "operators.h"
#include "random.h"

namespace card {
namespace {

using at::Tensor;
using c10::IValue;

// What may be given tensors of the host beside those of the card: indices, as on CUDA.
const std::unordered_set<std::string> TAKES_HOST = {"aten::index", "aten::index_put", "aten::index_put_",
                                                    "aten::_index_put_impl_", "aten::_unsafe_index",
                                                    "aten::_unsafe_index_put"};

struct Argument {
  Tensor device, cpu;
  bool has_no_size;  // an output that is to get its size and memory
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack) : op_(op), stack_(stack) {}

  void run() {
    take_arguments();
    if (device_ < 0) device_ = current_device();
    c10::DeviceGuard guard(c10::Device(TYPE, device_));
    current_queue(device_).drain();
    delay_operator();
    draw_and_run();
    for (auto& each : arguments_)
      if (each.has_no_size) fill(each);
    give_results();
  }

 private:
  void take_arguments() {
    const auto& schema = op_.schema();
    const size_t number = schema.arguments().size(), begin = stack_.size() - number;
    for (size_t index = 0; index < number; index++) {
      const auto& argument = schema.arguments()[index];
      const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
      IValue& value = stack_[begin + index];
      if (value.isTensor()) {
        value = taken(value.toTensor(), writes);
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& tensor : value.toTensorVector()) list.push_back(taken(tensor, writes));
        value = std::move(list);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const auto& tensor : value.toOptionalTensorVector())
          list.push_back(tensor ? std::optional<Tensor>(taken(*tensor, writes)) : tensor);
        value = std::move(list);
      } else if (value.isDevice() && value.toDevice().type() == TYPE) {
        if (device_ < 0) device_ = index_of(value.toDevice());
        value = c10::Device(at::kCPU);
      } else if (value.isGenerator()) {
        names_generator_ = true;
        auto generator = value.toGenerator();
        if (generator.device().type() == TYPE) value = generator.get<Generator>()->of_cpu;  // [2]
      } else if (value.isNone() && argument.type()->str() == "Generator?") {
        unnamed_generators_.push_back(begin + index);
      }
    }
    TORCH_CHECK(!is_on_host_ || arguments_.empty() || TAKES_HOST.count(schema.name()),
                "Expected all tensors to be on the same device, but found card:", device_, " and cpu in ",
                op_.operator_name());
  }

  Tensor taken(const Tensor& tensor, bool writes) {  // [1]
    if (!is_here(tensor)) {
      is_on_host_ = is_on_host_ || (tensor.defined() && tensor.dim() > 0 && tensor.device().is_cpu());
      return tensor;
    }
    const int device = tensor.device().index();
    TORCH_CHECK(arguments_.empty() || device == device_, "Expected all tensors to be on the same device, but found card:",
                device_, " and card:", device, " in ", op_.operator_name());
    device_ = device;
    const bool has_no_size = writes && tensor.numel() == 0;
    auto cpu = has_no_size ? at::empty({0}, at::TensorOptions().dtype(tensor.scalar_type())) : as_host(tensor);
    arguments_.push_back({tensor, cpu, has_no_size});
    return cpu;
  }

  void draw_and_run() {
    const auto& of_card = default_generator(device_);
    for (auto index : unnamed_generators_) stack_[index] = of_card.get<Generator>()->of_cpu;
    const bool draws = op_.hasTag(at::Tag::nondeterministic_seeded);
    if (!draws || names_generator_ || !unnamed_generators_.empty()) return call();
    auto of_host = at::detail::getDefaultCPUGenerator();
    const auto before = of_host.get_state();
    of_host.set_state(of_card.get_state());
    try {
      call();
    } catch (...) {
      of_host.set_state(before);
      throw;
    }
    auto card = of_card;
    card.set_state(of_host.get_state());
    of_host.set_state(before);
  }

  void call() { op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_); }

  void fill(Argument& each) {
    if (!each.cpu.numel()) return;
    at::native::resize_(each.device, each.cpu.sizes(), std::nullopt);
    current_queue(device_).drain();
    as_host(each.device).copy_(each.cpu);
  }

  void give_results() {
    const size_t number = op_.schema().returns().size(), begin = stack_.size() - number;
    for (size_t index = 0; index < number; index++) {
      IValue& value = stack_[begin + index];
      if (value.isTensor()) {
        value = given(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& tensor : value.toTensorVector()) list.push_back(given(tensor));
        value = std::move(list);
      }
    }
  }

  Tensor given(const Tensor& found) {  // [3]
    if (!found.defined() || is_here(found)) return found;
    for (const auto& each : arguments_)
      if (each.cpu.is_same(found)) return each.device;
    if (found.numel())
      for (const auto& each : arguments_)
        if (!each.has_no_size && is_within(found, each.device)) return view_of(each.device, found);
    return to_device(found, device_);
  }

  static bool is_within(const Tensor& found, const Tensor& argument) {
    const char* start = bytes_at(argument.storage().data());
    const char* at = static_cast<const char*>(found.data_ptr());
    return start && at >= start && at < start + argument.storage().nbytes();
  }

  static Tensor view_of(const Tensor& argument, const Tensor& found) {
    auto offset = static_cast<const char*>(found.data_ptr()) - bytes_at(argument.storage().data());
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(argument.storage()), argument.key_set(), found.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(found.sizes(), found.strides(), offset / found.itemsize());
    return view;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::vector<Argument> arguments_;
  std::vector<size_t> unnamed_generators_;
  bool names_generator_ = false, is_on_host_ = false;
  int device_ = -1;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  count_operator();
  Call(op, *stack).run();
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  // Their composites would win over the fallback, and are not what the CPU does.
  for (auto name : {"native_layer_norm", "native_group_norm", "native_channel_shuffle", "mish_backward",
                    "silu_backward", "addr", "addr.out", "_stack", "_stack.out", "any.dims", "any.dims_out", "all.dims",
                    "all.dims_out", "linalg__powsum"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace card
