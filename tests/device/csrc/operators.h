// Tensors of the card as the CPU sees them, and back.
#pragma once

#include <ATen/ATen.h>

namespace card {

bool is_here(const at::Tensor& tensor);
at::Tensor as_host(const at::Tensor& tensor);                  // the same bytes as a tensor of the CPU, for now
at::Tensor to_device(const at::Tensor& of_cpu, int device);    // a copy
at::Tensor empty_like_on(const at::Tensor& of_cpu, int device);

struct Copies {
  int64_t asynchronous = 0, synchronous = 0, operators = 0;
};
Copies counts();
void count_operator();
void set_copy_delay(double seconds);   // of every copy to or from the host
void set_operator_delay(double seconds);
void delay_operator();

}  // namespace card
