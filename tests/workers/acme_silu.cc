// A custom op for tests: out = x * sigmoid(slope * x), which is silu where the slope is 1.
#include <cmath>

#include "paddle/extension.h"

namespace {

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

std::vector<paddle::Tensor> Forward(const paddle::Tensor& x, float slope) {
  auto out = paddle::empty_like(x);
  const float* from = x.data<float>();
  float* to = out.data<float>();
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = from[i] * sigmoid(slope * from[i]);
  return {out};
}

std::vector<paddle::Tensor> Backward(const paddle::Tensor& x, const paddle::Tensor& gradient, float slope) {
  auto out = paddle::empty_like(x);
  const float *from = x.data<float>(), *arriving = gradient.data<float>();
  float* to = out.data<float>();
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float s = sigmoid(slope * from[i]);
    to[i] = arriving[i] * (s + slope * from[i] * s * (1 - s));
  }
  return {out};
}

PD_BUILD_OP(acme_silu).Inputs({"X"}).Outputs({"Out"}).Attrs({"slope: float"}).SetKernelFn(PD_KERNEL(Forward));

PD_BUILD_GRAD_OP(acme_silu)
    .Inputs({"X", paddle::Grad("Out")})
    .Outputs({paddle::Grad("X")})
    .Attrs({"slope: float"})
    .SetKernelFn(PD_KERNEL(Backward));
