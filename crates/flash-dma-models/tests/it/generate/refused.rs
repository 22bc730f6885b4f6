//! Refusals, and their texts.

use crate::generate::chain::Chain;
use crate::generate::model::{Model, Read, Watched, go_on, prompt};
use flash_dma_models::generate::{
    Beams, Draft, DraftRow, GenerateError, Generator, ModelDraft, PromptLookup, Proposal, Sampler,
};

fn text<T: std::fmt::Debug>(result: Result<T, GenerateError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn settings_and_prompts_are_refused_before_anything_is_read() {
    let model = Watched::new(Model::new(1));
    let fine = Generator::new(&model).with_max_new(4);
    let refused = |generator: &Generator<'_, Watched<Model>>, prompts: &[Vec<u32>]| {
        let error = text(generator.try_generate(prompts));
        // By every way of generating.
        let speculated = generator.try_speculate(prompts, &mut PromptLookup::new(1, 1), go_on);
        assert_eq!(text(speculated), error);
        if let [prompt] = prompts {
            assert_eq!(text(generator.try_beams(prompt, &Beams::new(1))), error);
        }
        error
    };
    let one = [vec![1]];
    let sampler = Sampler::random(0).with_top_p(2.0);
    let hot = fine.clone().with_sampler(sampler);
    let expected = "the sampler is refused: top_p is 2, but must be from 0 to 1";
    assert_eq!(refused(&hot, &one), expected);
    let chunk = fine.clone().with_chunk(0);
    assert_eq!(refused(&chunk, &one), "the chunk must be at least 1");
    let stop = fine.clone().with_stop(&[2, 48]);
    let expected = "the list of stop tokens has token 48, but the vocabulary has 48";
    assert_eq!(refused(&stop, &one), expected);
    let stops = fine.clone().with_stop_sequences(&[vec![1], vec![2, 50]]);
    let expected = "stop sequence 1 has token 50, but the vocabulary has 48";
    assert_eq!(refused(&stops, &one), expected);
    let empty = fine.clone().with_stop_sequences(&[vec![1], vec![]]);
    assert_eq!(refused(&empty, &one), "stop sequence 1 is empty");

    let expected = "prompt 1 is empty: a model predicts what follows a token";
    assert_eq!(refused(&fine, &[vec![1], vec![]]), expected);
    let expected = "prompt 0 at position 2 has token 99, but the vocabulary has 48";
    assert_eq!(refused(&fine, &[vec![1, 2, 99]]), expected);
    let expected = "prompt 0 has 253 tokens and 4 are to follow, but the model reads at most 256";
    assert_eq!(refused(&fine, &[prompt(253, 0)]), expected);
    assert_eq!(model.reads(), Vec::<Read>::new());
    // One token less is not too long.
    assert_eq!(fine.generate(&[prompt(252, 0)])[0].tokens.len(), 4);
}

#[test]
fn beams_that_make_no_sense_are_refused() {
    let model = Watched::new(Model::new(1));
    let generator = Generator::new(&model);
    let refused = |beams| text(generator.try_beams(&[1], &beams));
    let expected = "the number of beams must be at least 1";
    assert_eq!(refused(Beams::new(0)), expected);
    let expected = "the number of texts to be returned must be at least 1";
    assert_eq!(refused(Beams::new(2).with_returned(0)), expected);
    let expected = "3 texts are to be returned, but there are 2 beams";
    assert_eq!(refused(Beams::new(2).with_returned(3)), expected);
    let expected = "the length penalty is NaN, but must be finite";
    let endless = Beams::new(2).with_length_penalty(f64::NAN);
    assert_eq!(refused(endless), expected);
    let drawn = generator.clone().with_sampler(Sampler::random(0));
    let expected = "beams draw nothing: the sampler must be greedy, but has temperature 1";
    assert_eq!(text(drawn.try_beams(&[1], &Beams::new(2))), expected);
    assert_eq!(model.reads(), Vec::<Read>::new());
}

/// Proposes the same tokens for every row, or for too many rows.
struct Rude {
    tokens: Vec<u32>,
    more_rows: usize,
}

impl Draft for Rude {
    fn count(&self) -> usize {
        3
    }

    fn try_propose(
        &mut self,
        rows: &[DraftRow<'_>],
        _: usize,
        _: &Sampler,
    ) -> Result<Vec<Proposal>, GenerateError> {
        let proposal = Proposal::certain(&self.tokens);
        Ok(vec![proposal; rows.len() + self.more_rows])
    }
}

#[test]
fn drafts_that_do_not_suit_the_model_are_refused() {
    let model = Watched::new(Model::new(1));
    let generator = Generator::new(&model).with_max_new(200);
    let refused = |draft: &mut dyn Draft| text(generator.try_speculate(&[[1, 2]], draft, go_on));
    let chain = Chain(vec![vec![0.5; 2]; 2]);
    let expected = "the draft has a vocabulary of 2 tokens, the model of 48";
    assert_eq!(refused(&mut ModelDraft::new(&chain, 2)), expected);
    let expected = "the number of tokens that a draft proposes must be at least 1";
    assert_eq!(refused(&mut ModelDraft::new(&model, 0)), expected);
    assert_eq!(refused(&mut PromptLookup::new(1, 0)), expected);
    let expected = "the number of tokens that a lookup compares must be at least 1";
    assert_eq!(refused(&mut PromptLookup::new(0, 1)), expected);
    let mut short = Watched::new(Model::new(1));
    short.max_len = Some(100);
    let expected = "prompt 0 has 2 tokens and 200 are to follow, but the draft reads at most 100";
    assert_eq!(refused(&mut ModelDraft::new(&short, 2)), expected);
    assert_eq!(model.reads(), Vec::<Read>::new());

    let rude = |tokens: &[u32], more_rows| {
        let tokens = tokens.to_vec();
        refused(&mut Rude { tokens, more_rows })
    };
    let expected = "the draft has token 77, but the vocabulary has 48";
    assert_eq!(rude(&[1, 77], 0), expected);
    let asked = "the draft was asked for at most 3 tokens for each of 1 sequences";
    assert_eq!(rude(&[1; 4], 0), format!("{asked}: it proposes 4"));
    assert_eq!(rude(&[1], 1), format!("{asked}: it has proposals for 2"));
}

#[test]
fn logits_that_give_no_token_are_refused_by_sequence_and_place() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    // 0 goes to 1, which goes to 2, whose distribution is broken.
    let broken = |row: Vec<f64>| Chain(vec![vec![0.0, 1.0, 0.0], vec![0.0, 0.0, 1.0], row]);
    let refused = |row: Vec<f64>, sampler: Sampler| {
        let chain = broken(row);
        let generator = Generator::new(&chain).with_sampler(sampler).with_max_new(8);
        let prompts = [vec![1, 1, 1], vec![0], vec![0, 0]];
        let error = text(generator.try_generate(&prompts));
        let beams = generator.clone().with_sampler(Sampler::greedy());
        assert_eq!(text(beams.try_beams(&[1], &Beams::new(2))), error);
        error
    };
    let random = Sampler::random(3);
    for sampler in [Sampler::greedy(), random, random.with_top_k(2)] {
        for (row, expected) in [
            ([nan, 0.5, 0.5], "a logit is NaN"),
            ([0.5, 0.5, inf], "the logit of token 2 is infinite"),
            ([0.0; 3], "no token is possible: every logit is -inf"),
        ] {
            let expected = format!("the model has no token 1 for sequence 0: {expected}");
            assert_eq!(refused(row.to_vec(), sampler), expected);
        }
    }
    // Impossible tokens are no fault.
    let chain = broken(vec![1.0, 0.0, 0.0]);
    let texts = Generator::new(&chain).with_max_new(4).generate(&[[0]]);
    assert_eq!(texts[0].tokens, [1, 2, 0, 1]);
}

#[test]
fn a_draft_without_a_law_is_named() {
    let fine = Chain(vec![vec![0.5, 0.5], vec![0.5, 0.5]]);
    let broken = Chain(vec![vec![0.0; 2], vec![0.0; 2]]);
    let generator = Generator::new(&fine).with_max_new(8);
    let generator = generator.with_sampler(Sampler::random(0));
    let mut draft = ModelDraft::new(&broken, 2);
    let written = generator.try_speculate(&[[0]], &mut draft, go_on);
    let expected =
        "the draft has no token 1 for sequence 0: no token is possible: every logit is -inf";
    assert_eq!(text(written), expected);
}

#[test]
fn a_decoder_that_returns_other_logits_is_refused() {
    let mut model = Watched::new(Chain(vec![vec![0.5; 2]; 2]));
    model.talkative = true;
    let error = text(Generator::new(&model).try_generate(&[[0, 1, 1]]));
    let expected = "the decoder returned logits [1, 3, 2], but must return [1, 1, 2]";
    assert_eq!(error, expected);
}

#[test]
#[should_panic(expected = "prompt 0 is empty: a model predicts what follows a token")]
fn the_plain_form_panics_with_the_text_of_the_error() {
    let model = Model::new(1);
    let _ = Generator::new(&model).generate(&[Vec::new()]);
}
