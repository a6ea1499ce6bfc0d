"""transformer_lens.utilities: small tools that need no model, a file for each kind."""
# ruff: noqa: F401

import types

from compat.tlens.utilities import addmm, attention, cache
from compat.tlens.utilities.activation_functions import (
    SOFTCAP_DISABLED,
    SUPPORTED_ACTIVATIONS,
    ActivationFunction,
    apply_softcap,
    gelu_fast,
    gelu_new,
    gelu_pytorch_tanh,
    softcap_enabled,
    solu,
)
from compat.tlens.utilities.attribute_utils import get_nested_attr, set_nested_attr
from compat.tlens.utilities.components_utils import get_act_name
from compat.tlens.utilities.defaults_utils import (
    USE_DEFAULT_VALUE,
    LocallyOverridenDefaults,
    override_or_use_default_value,
)
from compat.tlens.utilities.devices import ModelWithCfg, get_device, move_to_and_update_config, warn_if_mps
from compat.tlens.utilities.exploratory_utils import test_prompt
from compat.tlens.utilities.gpu_utils import print_gpu_mem
from compat.tlens.utilities.hf_utils import (
    clear_huggingface_cache,
    download_file_from_hf,
    get_dataset,
    get_rotary_pct_from_config,
    keep_single_column,
    select_compatible_kwargs,
)
from compat.tlens.utilities.initialization_utils import (
    NonlinearityType,
    calc_fan_in_and_fan_out,
    init_kaiming_normal_,
    init_kaiming_uniform_,
    init_xavier_normal_,
    init_xavier_uniform_,
)
from compat.tlens.utilities.library_utils import is_library_available
from compat.tlens.utilities.lm_utils import lm_accuracy, lm_cross_entropy_loss
from compat.tlens.utilities.logits_utils import logits_to_df, sample_logits
from compat.tlens.utilities.matrix import composition_scores, get_matrix_corner
from compat.tlens.utilities.multi_gpu import (
    calculate_available_device_cuda_memory,
    count_unique_devices,
    determine_available_memory_for_available_devices,
    find_embedding_device,
    get_best_available_cuda_device,
    get_best_available_device,
    get_device_for_block_index,
    resolve_device_map,
    sort_devices_based_on_available_memory,
)
from compat.tlens.utilities.parameter_swap import temporarily_swap_parameter
from compat.tlens.utilities.slice import Slice, SliceInput
from compat.tlens.utilities.tensors import (
    check_structure,
    filter_dict_by_prefix,
    get_corner,
    get_cumsum_along_dim,
    get_offset_position_ids,
    is_lower_triangular,
    is_square,
    remove_batch_dim,
    repeat_along_head_dimension,
    to_numpy,
    transpose,
)
from compat.tlens.utilities.tokenize_utils import (
    get_attention_mask,
    get_input_with_manually_prepended_bos,
    get_tokenizer_with_bos,
    get_tokens_with_bos_removed,
    tokenize_and_concatenate,
)
from compat.tlens.utilities.typed_module_list import TypedModuleList

# `import *` must not bring the submodule called slice over the built-in.
__all__ = [
    name for name, value in globals().items() if not name.startswith("_") and not isinstance(value, types.ModuleType)
]
