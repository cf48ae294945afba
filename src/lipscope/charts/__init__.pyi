# The front door: what other rooms may use.
from .curves import (
    LineKind as LineKind,
    Panel as Panel,
    Point as Point,
    Series as Series,
    curves_chart as curves_chart,
    power_law as power_law,
)
from .growth import (
    Grown as Grown,
    bounds_chart as bounds_chart,
    focus_chart as focus_chart,
    layers_chart as layers_chart,
    push_chart as push_chart,
    radius_chart as radius_chart,
    signals_chart as signals_chart,
    training_chart as training_chart,
)
from .layers import (
    MAPS as MAPS,
    SIDES as SIDES,
    TITLES as TITLES,
    changes_chart as changes_chart,
    depth_chart as depth_chart,
    exponents_chart as exponents_chart,
    heads_chart as heads_chart,
    sides_chart as sides_chart,
    slopes_chart as slopes_chart,
)
from .look import (
    Chart as Chart,
    Frame as Frame,
    as_svg as as_svg,
    in_lines as in_lines,
    in_the_page as in_the_page,
    save_each as save_each,
)
from .marks import (
    CERTIFIED as CERTIFIED,
    PROMISE as PROMISE,
    kind_of as kind_of,
    layer_labels as layer_labels,
    palette as palette,
    spaced as spaced,
    spread as spread,
    tick_values as tick_values,
    training_end as training_end,
    visible as visible,
)
from .tokens import (
    WAYS as WAYS,
    Scene as Scene,
    animate as animate,
    gains_chart as gains_chart,
    shaded_text as shaded_text,
)
