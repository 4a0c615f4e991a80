"""Random views of a batch of images, as contrastive losses want them."""

import torch
import torch.nn.functional as F
from torch import Tensor


def views(x: Tensor) -> Tensor:
    """A random crop of each image, mirrored or not, with more or less contrast; (N, C, H, W) again."""
    n = len(x)
    zoom = 1 - 0.4 * torch.rand(n, device=x.device)
    mirrored = torch.rand(n, device=x.device) < 0.5
    flip = torch.where(mirrored, -1.0, 1.0)
    shift = 2 * torch.rand(n, 2, device=x.device) - 1
    affine = torch.zeros(n, 2, 3, device=x.device)
    affine[:, 0, 0] = zoom * flip
    affine[:, 1, 1] = zoom
    affine[:, :, 2] = (1 - zoom)[:, None] * shift
    grid = F.affine_grid(affine, list(x.shape), align_corners=False)
    cropped = F.grid_sample(x, grid, align_corners=False)
    contrast = 1 + 0.3 * torch.randn(n, 1, 1, 1, device=x.device)
    return cropped * contrast
