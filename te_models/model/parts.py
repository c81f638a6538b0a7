"""The module of each kind of mixer and MLP that te_models.config.layers can describe."""

from te_models.config.attention import AttentionSpec
from te_models.config.deltanet import DeltaNetSpec
from te_models.config.kda import KDASpec
from te_models.config.latent import LatentAttentionSpec
from te_models.config.mamba2 import Mamba2Spec
from te_models.config.mlp import MLPSpec
from te_models.config.moe import MoESpec
from te_models.config.parallel import ParallelSpec
from te_models.config.short_conv import ShortConvSpec
from te_models.model.attention import GatedAttention
from te_models.model.deltanet import GatedDeltaNet
from te_models.model.kda import KimiDeltaAttention
from te_models.model.latent import LatentAttention
from te_models.model.mamba2 import Mamba2
from te_models.model.mlp import MLP
from te_models.model.moe import Experts
from te_models.model.parallel import ParallelMixer
from te_models.model.part import MIXERS, MLPS
from te_models.model.short_conv import ShortConv

MIXERS.update(
    {
        AttentionSpec: GatedAttention,
        DeltaNetSpec: GatedDeltaNet,
        LatentAttentionSpec: LatentAttention,
        ShortConvSpec: ShortConv,
        Mamba2Spec: Mamba2,
        KDASpec: KimiDeltaAttention,
        ParallelSpec: ParallelMixer,
    }
)
MLPS.update({MLPSpec: MLP, MoESpec: Experts})
