// Real operators, each with the device where it is most telling.
const of = (dtype, ...shape) => ({ dtype, shape });
const GEMM = 'C[m, n] +=! A[m, k] * B[k, n]';

export const EXAMPLES = [
  {
    name: 'GEMM 4096 × 4096 × 64', target: 'nvidia-h200-sxm', expression: GEMM,
    inputs: { A: of('bfloat16', 4096, 64), B: of('bfloat16', 64, 4096) },
  },
  {
    name: 'GEMM of few rows, 16 × 14336 × 4096', target: 'nvidia-h200-sxm', expression: GEMM,
    inputs: { A: of('bfloat16', 16, 4096), B: of('bfloat16', 4096, 14336) },
  },
  {
    name: 'Attention, grouped queries', target: 'nvidia-a100-sxm-80gb', expression: 'Y = attention(Q, K, V, causal=true)',
    inputs: { Q: of('bfloat16', 2, 32, 2048, 128), K: of('bfloat16', 2, 8, 2048, 128), V: of('bfloat16', 2, 8, 2048, 128) },
  },
  {
    name: '3 × 3 convolution with ReLU', target: 'cpu-x86-avx512', constants: ['W'],
    expression: 'Y = conv2d(X, W, b, padding=1, activation="relu")',
    inputs: { X: of('float32', 1, 64, 56, 56), W: of('float32', 64, 64, 3, 3), b: of('float32', 64) },
  },
  {
    name: 'Softmax of 50257 columns', target: 'nvidia-h100-sxm',
    expression: 'high[i] >=! x[i, j]\ne[i, j] = exp(x[i, j] - high[i])\ntotal[i] +=! e[i, j]\ny[i, j] = e[i, j] / total[i]',
    inputs: { x: of('float32', 2048, 50257) },
  },
  {
    name: 'RMS normalisation', target: 'nvidia-l40s',
    expression: 's[i] +=! x[i, j] * x[i, j]\ny[i, j] = x[i, j] / sqrt(s[i] / 4096.0 + 0.00001) * w[j]',
    inputs: { x: of('float32', 4096, 4096), w: of('float32', 4096) },
  },
  {
    name: 'Product with int4 weights', target: 'nvidia-a100-sxm-80gb',
    expression: 'w[k, n] = (bitwise_and(q[k // 8, n] >> k % 8 * 4, 15) - 8).cast(`float16`) * s[k // 128, n] where k in 4096\n'
      + 'y[m, n] +=! x[m, k] * w[k, n]',
    inputs: { q: of('int32', 512, 4096), s: of('float16', 32, 4096), x: of('float16', 16, 4096) },
  },
];
