//! What is special to `burn-flash-dma`: training the bias alone, and plans that serve several calls.

use flash_dma_problem::ElementType;
use flash_dma_reference::compare::{GRADIENT, compare};
use flash_dma_tests::engines::{Backend, Burn};
use flash_dma_tests::fast_burn;
use flash_dma_tests::masked::{MaskedCase, MaskedEngine, Pattern};

fast_burn!(the_bias_alone, one_plan_for_two_calls);

fn the_bias_alone<B: Backend>(burn: &Burn<B>) {
    for (bias, element) in [
        ([1, 2, 1, 70], ElementType::F32),
        ([2, 4, 30, 70], ElementType::Bf16),
        ([1, 4, 1, 1], ElementType::F16),
        ([2, 1, 30, 1], ElementType::F32),
    ] {
        let case = MaskedCase::new([2, 4, 2, 30, 70, 64])
            .element(element)
            .mask([1, 2, 30, 70], Pattern::Random(0.5))
            .bias(bias)
            .causal(true);
        let inputs = case.inputs();
        let (grad_out, grad_lse) = case.gradients(&inputs);
        let exact = inputs.backward(&grad_out, grad_lse.as_deref()).bias;
        let (_, naive) = inputs.naive_backward(&grad_out, grad_lse.as_deref());
        let (exact, naive) = exact.zip(naive).expect("there is a bias");
        let actual = burn.bias_alone(&case.call(&inputs));
        let f32 = ElementType::F32;
        compare("dbias", &bias, &actual, &exact, &naive, f32, GRADIENT).expect("the bias alone");
    }
}

fn one_plan_for_two_calls<B: Backend>(burn: &Burn<B>) {
    for (causal, hidden) in [(true, false), (false, true)] {
        let mut case = MaskedCase::new([2, 4, 2, 50, 130, 64])
            .element(ElementType::Bf16)
            .mask([2, 2, 50, 130], Pattern::Random(0.3))
            .bias([1, 1, 1, 130])
            .causal(causal);
        case.hidden = hidden;
        let call = case.call(&case.inputs());
        let expected = burn.masked_forward(&call).expect("a good case").out;
        let [first, second] = burn.twice_with_plan(&call);
        assert!(first == expected && second == expected, "{case:?}");
    }
}
