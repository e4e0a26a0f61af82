// What touches memory itself: making tensors, views of them, copies between host and device.
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "memory.h"
#include "pinned.h"

namespace card {

using at::IntArrayRef;
using at::Tensor;

namespace {

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
std::atomic<int64_t> num_asynchronous{0}, num_synchronous{0}, num_operators{0};
std::atomic<int64_t> copy_delay_us{0}, operator_delay_us{0};

int64_t microseconds(double seconds) { return static_cast<int64_t>(seconds * 1e6); }
void sleep_us(int64_t delay) {
  if (delay) usleep(delay);
}

}  // namespace

Copies counts() { return {num_asynchronous, num_synchronous, num_operators}; }
void count_operator() { num_operators++; }
void set_copy_delay(double seconds) { copy_delay_us = microseconds(seconds); }
void set_operator_delay(double seconds) { operator_delay_us = microseconds(seconds); }
void delay_operator() { sleep_us(operator_delay_us); }

bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

Tensor as_host(const Tensor& tensor) {
  char* start = bytes_at(tensor.storage().data());
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  void* bytes = start ? start + tensor.storage_offset() * tensor.itemsize() : nullptr;
  auto found = at::from_blob(bytes, tensor.sizes(), tensor.strides(), options);
  found._set_conj(tensor.is_conj());
  found._set_neg(tensor.is_neg());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) found.unsafeGetTensorImpl()->set_wrapped_number(true);
  return found;
}

Tensor empty_like_on(const Tensor& of_cpu, int device) {
  c10::DeviceGuard guard(c10::Device(TYPE, device));
  return at::detail::empty_strided_generic(of_cpu.sizes(), of_cpu.strides(), &memory(), KEYS, of_cpu.scalar_type());
}

Tensor to_device(const Tensor& of_cpu, int device) {
  if (!of_cpu.is_non_overlapping_and_dense()) return to_device(of_cpu.contiguous(), device);
  auto found = empty_like_on(of_cpu, device);
  if (of_cpu.numel()) {
    current_queue(device).drain();  // the poison of the memory that it was given
    std::memcpy(bytes_at(found.storage().data()), of_cpu.data_ptr(), of_cpu.nbytes());
  }
  return found;
}

// Tensors and views ---------------------------------------------------------------------------------------------------

namespace {

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &memory(), KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &memory(), KEYS, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& tensor, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

Tensor& set_strided(Tensor& tensor, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset, size, stride);
}

Tensor& set_storage(Tensor& tensor, at::Storage storage) { return at::native::set_(tensor, std::move(storage)); }

Tensor& set_nothing(Tensor& tensor) {
  c10::DeviceGuard guard(tensor.device());
  at::Storage nothing(c10::Storage::use_byte_size_t(), 0, memory().allocate(0), &memory(), true);
  return tensor.set_(nothing, 0, {0}, {});
}

void record_stream(Tensor& tensor, at::Stream stream) { memory().recordStream(tensor.storage().data_ptr(), stream); }

// Copies --------------------------------------------------------------------------------------------------------------

bool is_one_stretch(const Tensor& from, const Tensor& to) {
  auto is_plain = [](const Tensor& tensor) { return !tensor.is_conj() && !tensor.is_neg(); };
  return from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() && from.strides() == to.strides() &&
         from.is_non_overlapping_and_dense() && is_plain(from) && is_plain(to);
}

// The copy as a job, by addresses alone.
std::function<void()> copying(const Tensor& from, const Tensor& to, int64_t delay) {
  if (is_one_stretch(from, to)) {
    return [source = from.data_ptr(), target = to.data_ptr(), nbytes = from.nbytes(), delay] {
      sleep_us(delay);
      std::memcpy(target, source, nbytes);
    };
  }
  TORCH_CHECK(!from.is_conj() && !to.is_conj() && !from.is_neg() && !to.is_neg(), "card: a copy of a conjugate view");
  auto bare = [](const Tensor& tensor) {
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options());
  };
  return [source = bare(from), target = bare(to), delay] {
    sleep_us(delay);
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    target.copy_(source);
  };
}

void copy_now(const Tensor& from, const Tensor& to, int device) {
  auto& queue = current_queue(device);
  if (auto delay = copy_delay_us.load()) queue.push([delay] { sleep_us(delay); });
  queue.drain();
  to.copy_(from);
  num_synchronous++;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (!to.numel()) return to;
  const bool leaves = is_here(from), comes = is_here(to), stays = leaves && comes;
  const int device = (comes ? to : from).device().index();
  auto source = leaves ? as_host(from) : from, target = comes ? as_host(to) : to;
  if (stays && from.device() != to.device()) {
    current_queue(from.device().index()).drain();
    copy_now(source, target, device);
    return to;
  }
  const void* on_host = stays ? nullptr : (leaves ? target : source).storage().data();
  if (!stays && !(non_blocking && pinned().contains(on_host))) {
    copy_now(source, target, device);
    return to;
  }
  auto& queue = current_queue(device);
  queue.push(copying(source, target, stays ? 0 : copy_delay_us.load()));
  if (!stays) {
    num_asynchronous++;
    pinned().use((leaves ? target : source).data_ptr(), queue.mark());
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

// A sparse or scalar-less world: convolutions have kernels of their own on such a device --------------------------------

using Optional = const std::optional<Tensor>&;
using Sizes = c10::SymIntArrayRef;

Tensor convolution(const Tensor& x, const Tensor& w, Optional bias, Sizes stride, Sizes padding, Sizes dilation,
                   bool transposed, Sizes output_padding, c10::SymInt groups) {
  at::AutoDispatchBelowADInplaceOrView below;
  const int device = x.device().index();
  current_queue(device).drain();
  auto b = bias && bias->defined() ? std::optional<Tensor>(as_host(*bias)) : std::nullopt;
  return to_device(at::convolution_symint(as_host(x), as_host(w), b, stride, padding, dilation, transposed,
                                          output_padding, groups),
                   device);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& dy, const Tensor& x, const Tensor& w,
                                                        Sizes stride, Sizes padding, Sizes dilation, bool transposed,
                                                        Sizes output_padding, c10::SymInt groups,
                                                        std::array<bool, 3> mask) {
  at::AutoDispatchBelowADInplaceOrView below;
  const int device = x.device().index();
  current_queue(device).drain();
  c10::SymInt bias = transposed ? w.sym_size(1) * groups : w.sym_size(0);
  auto [dx, dw, db] = at::convolution_backward_symint(as_host(dy), as_host(x), as_host(w), Sizes(&bias, 1), stride,
                                                      padding, dilation, transposed, output_padding, groups, mask);
  auto moved = [&](const Tensor& found) { return found.defined() ? to_device(found, device) : found; };
  return {moved(dx), moved(dw), moved(db)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", at::native::resize_);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_strided);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_", set_nothing);
  library.impl("record_stream", record_stream);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the macros below know it by this name
  using namespace at::autocast;
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define WIDE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LOW)
  AT_FORALL_FP32(WIDE)
}

}  // namespace card
