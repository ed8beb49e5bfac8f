"""Gated delta rule and the causal convolution before it (Qwen3.5's linear attention).

Per value head, with key k, query q (both of unit length, q also divided by sqrt(Dk)), value v, decay g <= 0 (log) and
step beta, the state S [Dk, Dv] moves by

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q

Shapes: T tokens, B sequences, N value heads, C channels, W taps. All of it in f32 (f64 for f64).
Source: Yang et al., Gated Delta Networks (arXiv 2412.06464); the chunk form is its section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64


def causal_conv(u_TC: Tensor, weight_CW: Tensor, past_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Depthwise convolution over one sequence, then silu. past [C, W-1] are the inputs before u (zeros at the start).

    -> ([T, C] in u's type, the new past). The last tap meets the current token.
    """
    taps = weight_CW.shape[1]
    x = torch.cat([past_CV.to(u_TC.dtype), u_TC.T], dim=1)
    windows = x.to(weight_CW.dtype).unfold(1, taps, 1)  # [C, T, W]
    y = torch.einsum("ctw,cw->tc", windows, weight_CW)
    return functional.silu(y).to(u_TC.dtype), x[:, x.shape[1] - taps + 1 :]


def causal_conv_step(u_BC: Tensor, weight_CW: Tensor, past_BCV: Tensor) -> tuple[Tensor, Tensor]:
    """`causal_conv` for one token of each of B sequences; past [B, C, W-1]."""
    x = torch.cat([past_BCV.to(u_BC.dtype), u_BC[:, :, None]], dim=2)
    y = torch.einsum("bcw,cw->bc", x.to(weight_CW.dtype), weight_CW)
    return functional.silu(y).to(u_BC.dtype), x[:, :, 1:]


def unit(x: Tensor) -> Tensor:
    """x / |x| along the last dimension, with the reference implementation's 1e-6 under the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences: q, k [B, N, Dk], v [B, N, Dv], g, beta [B, N], state [B, N, Dk, Dv]."""
    state = state * g.exp()[..., None, None]
    delta = (v - torch.einsum("bnkv,bnk->bnv", state, k)) * beta[..., None]
    state = state + k[..., :, None] * delta[..., None, :]
    return torch.einsum("bnkv,bnk->bnv", state, q), state


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A run of T tokens of one sequence: q, k [T, N, Dk], v [T, N, Dv], g, beta [T, N], state [N, Dk, Dv].

    Equal to `step` token by token; inside a chunk the T updates are one triangular solve. With G the running sum of g
    and M[i,j] = exp(G_i - G_j) for i >= j:  (I + strict_lower(beta_i k_i.k_j M)) [U | W] = [beta v | beta k exp(G)];
    V' = U - W S;  O = (q exp(G)) S + (q k^T M) V';  S <- exp(G_end) S + (k exp(G_end - G))^T V'.
    -> ([T, N, Dv], new state).
    """
    out = []
    for a in range(0, q.shape[0], CHUNK):
        qc, kc, vc = (x[a : a + CHUNK].transpose(0, 1) for x in (q, k, v))  # [N, c, D]
        gc, bc = g[a : a + CHUNK].T, beta[a : a + CHUNK].T[..., None]
        total = gc.cumsum(-1)
        n = total.shape[-1]
        later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        # Masked before exp: above the diagonal the difference is positive and could overflow.
        m = (total[:, :, None] - total[:, None, :]).masked_fill(later, float("-inf")).exp()
        decay = total.exp()[..., None]
        a_mat = torch.tril(bc * (kc @ kc.transpose(1, 2)) * m, -1)
        rhs = torch.cat([bc * vc, bc * kc * decay], dim=-1)
        solved = torch.linalg.solve_triangular(a_mat, rhs, upper=False, unitriangular=True)
        u, w = solved.split([vc.shape[-1], kc.shape[-1]], dim=-1)
        fresh = u - w @ state
        out.append(((qc * decay) @ state + (qc @ kc.transpose(1, 2) * m) @ fresh).transpose(0, 1))
        rest = (total[:, -1:] - total).exp()[..., None]
        state = state * total[:, -1].exp()[:, None, None] + (kc * rest).transpose(1, 2) @ fresh
    return torch.cat(out), state
